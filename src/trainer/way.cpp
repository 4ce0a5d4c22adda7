#include "way.hpp"

#include <lockstep/lab/half_precision_hook.hpp>
#include <lockstep/lab/power_sgd.hpp>
#include <lockstep/trainer/train_options.hpp>

#include "option_pairs.hpp"

namespace lockstep {

FlatWay flat(const Way& way) {
  FlatWay all;
  if (const auto* averaged = std::get_if<Averaged>(&way)) all.compress = static_cast<Compression>(averaged->rounding);
  if (const auto* power_sgd = std::get_if<PowerSgd>(&way)) {
    all.compress = Compression::powersgd;
    all.compress_rank = power_sgd->rank;
  }
  if (const auto* sharded = std::get_if<Sharded>(&way)) all.zero_stage = static_cast<int>(*sharded);
  if (const auto* local = std::get_if<LocalSgdOptions>(&way)) all.local = *local;
  if (const auto* network = std::get_if<SplitNetwork>(&way)) {
    all.compress = static_cast<Compression>(network->rounding);
    all.split = network->split;
  }
  all.cuda_graph = std::holds_alternative<Recorded>(way);
  return all;
}

Way way_of(const FlatWay& flat) {
  check_pairs({.options = TrainOptions(), .way = flat});
  if (flat.compress == Compression::powersgd)
    return flat.compress_rank == 0 ? PowerSgd() : PowerSgd{flat.compress_rank};
  if (flat.zero_stage != 0) return static_cast<Sharded>(flat.zero_stage);
  if (flat.local.sync_every != 0) return flat.local;
  if (flat.cuda_graph) return Recorded();
  const auto rounding = static_cast<Rounding>(flat.compress);
  if (flat.split) return SplitNetwork{*flat.split, rounding};
  return Averaged{rounding};
}

bool by_data_alone(const ModelSplit& split) {
  return split.stages() == 1 && split.mesh.tensor == 1 && split.microbatches == 1;
}

Way with_split(const Way& way, const std::optional<ModelSplit>& split) {
  FlatWay all = flat(way);
  all.split = split;
  return way_of(all);
}

std::shared_ptr<CommunicationHook> make_communication_hook(const Way& way, uint64_t seed) {
  const FlatWay all = flat(way);
  if (all.compress == Compression::none) return nullptr;
  if (all.compress == Compression::powersgd)
    return std::make_shared<PowerSgdHook>(PowerSgdOptions{.rank = all.compress_rank, .seed = seed});
  return std::make_shared<HalfPrecisionHook>(all.compress == Compression::bf16 ? at::kBFloat16 : at::kHalf);
}

}  // namespace lockstep
