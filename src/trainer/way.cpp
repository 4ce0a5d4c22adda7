#include "way.hpp"

#include <lockstep/lab/half_precision_hook.hpp>
#include <lockstep/lab/power_sgd.hpp>
#include <lockstep/trainer/train_options.hpp>

#include "base/classic.hpp"
#include "base/names.hpp"
#include "option_pairs.hpp"

#include <array>

namespace lockstep {
namespace {

constexpr std::array compressions{std::pair{Compression::none, "none"}, std::pair{Compression::bf16, "bf16"},
                                  std::pair{Compression::fp16, "fp16"}, std::pair{Compression::powersgd, "powersgd"}};

struct Flatten {
  FlatWay operator()(const Averaged& way) const { return {.compress = static_cast<Compression>(way.rounding)}; }
  FlatWay operator()(const PowerSgd& way) const {
    return {.compress = Compression::powersgd, .compress_rank = way.rank};
  }
  FlatWay operator()(Sharded sharded) const { return {.zero_stage = static_cast<int>(sharded)}; }
  FlatWay operator()(const LocalSgdOptions& way) const {
    return {.sync_every = way.sync_every, .outer_lr = way.outer_lr, .outer_momentum = way.outer_momentum};
  }
  FlatWay operator()(const SplitNetwork& way) const {
    return {.compress = static_cast<Compression>(way.rounding), .split = way.split};
  }
  FlatWay operator()(const Recorded&) const { return {.cuda_graph = true}; }
};

}  // namespace

std::string_view to_string(Compression compression) {
  return name_in(compressions, compression);
}

Compression compression_from(std::string_view name) {
  return value_in(compressions, name, "the compression of gradients");
}

FlatWay flat(const Way& way) {
  return std::visit(Flatten(), way);
}

Way way_of(const FlatWay& flat) {
  check_pairs({.options = TrainOptions(), .way = flat});
  if (flat.compress == Compression::powersgd)
    return flat.compress_rank == 0 ? PowerSgd() : PowerSgd{flat.compress_rank};
  if (flat.zero_stage != 0) return static_cast<Sharded>(flat.zero_stage);
  if (flat.sync_every != 0) return LocalSgdOptions{flat.sync_every, flat.outer_lr, flat.outer_momentum};
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
  switch (const FlatWay all = flat(way); all.compress) {
    case Compression::bf16:
      return std::make_shared<HalfPrecisionHook>(at::kBFloat16);
    case Compression::fp16:
      return std::make_shared<HalfPrecisionHook>(at::kHalf);
    case Compression::powersgd:
      return std::make_shared<PowerSgdHook>(PowerSgdOptions{.rank = all.compress_rank, .seed = seed});
    case Compression::none:
      break;
  }
  return nullptr;
}

std::string exchange_text(const Way& way) {
  Classic<std::ostringstream> text;
  const FlatWay all = flat(way);
  if (all.compress == Compression::powersgd) {
    text << "gradients by PowerSGD, rank " << all.compress_rank;
  } else if (all.compress != Compression::none) {
    text << "gradients in " << to_string(all.compress);
  }
  if (all.sync_every > 0) {
    text << "parameters every " << all.sync_every << (all.sync_every == 1 ? " step" : " steps");
    if (all.outer_lr != 1 || all.outer_momentum != 0) {
      text << ", outer learning rate " << all.outer_lr << ", outer momentum " << all.outer_momentum;
    }
  }
  return text.str();
}

}  // namespace lockstep
