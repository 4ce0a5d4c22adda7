#include "flat_options.hpp"

#include <lockstep/lab/half_precision_hook.hpp>
#include <lockstep/lab/power_sgd.hpp>

#include "batch_settings.hpp"
#include "option_pairs.hpp"

namespace lockstep {
namespace {

Way way_of(const FlatOptions& flat) {
  if (flat.compress == Compression::powersgd)
    return flat.compress_rank == 0 ? PowerSgd() : PowerSgd{flat.compress_rank};
  if (flat.zero_stage != 0) return static_cast<Sharded>(flat.zero_stage);
  if (flat.local.sync_every != 0) return flat.local;
  const auto rounding = static_cast<Rounding>(flat.compress);
  if (flat.split) return SplitNetwork{*flat.split, rounding};
  return Averaged{rounding};
}

DataSource data_of(const FlatOptions& flat) {
  if (!flat.text.empty()) return TextFile{flat.text};
  if (flat.data == Images::synthetic) return SyntheticImages();
  return FashionMnist{flat.data_dir};
}

}  // namespace

FlatOptions flat(const TrainOptions& options) {
  FlatOptions all;
  const Way& way = options.way;
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
  if (std::holds_alternative<SyntheticImages>(options.data)) all.data = Images::synthetic;
  if (const auto* images = std::get_if<FashionMnist>(&options.data)) all.data_dir = images->folder;
  if (const auto* text = std::get_if<TextFile>(&options.data)) all.text = text->file;
  all.keep_last = options.keep.checkpoints ? options.keep.checkpoints->last : 0;
  if (options.keep.checkpoints) all.checkpoint_every = options.keep.checkpoints->every;
  all.grain = grain_of(options.batch);
  if (options.batch.grain) all.check_arithmetic = options.batch.grain->check_arithmetic;
  return all;
}

void take_flat(const FlatOptions& values, TrainOptions& options) {
  check_flat(values);
  options.way = way_of(values);
  options.data = data_of(values);
  options.keep.checkpoints.reset();
  if (values.keep_last != 0) options.keep.checkpoints = {.last = values.keep_last, .every = values.checkpoint_every};
  options.batch.grain.reset();
  if (values.grain != 0) options.batch.grain = Grains(values.grain, values.check_arithmetic);
}

bool by_data_alone(const ModelSplit& split) {
  return split.stages() == 1 && split.mesh.tensor == 1 && split.microbatches == 1;
}

void set_split(const std::optional<ModelSplit>& split, TrainOptions& options) {
  FlatOptions all = flat(options);
  all.split = split;
  take_flat(all, options);
}

std::shared_ptr<CommunicationHook> make_communication_hook(const TrainOptions& options) {
  const FlatOptions all = flat(options);
  if (all.compress == Compression::none) return nullptr;
  if (all.compress == Compression::powersgd)
    return std::make_shared<PowerSgdHook>(PowerSgdOptions{.rank = all.compress_rank, .seed = options.seed});
  return std::make_shared<HalfPrecisionHook>(all.compress == Compression::bf16 ? at::kBFloat16 : at::kHalf);
}

}  // namespace lockstep
