#include "grain.hpp"

#include <lockstep/base/error.hpp>

#include "base/number_text.hpp"
#include "batch_settings.hpp"
#include "train_options.hpp"

namespace lockstep {

void check_grain(const TrainOptions& options) {
  const int64_t grain = options.batch.grain;
  if (grain < 0 || grain > options.batch.global()) {
    throw Error("the samples that are computed by themselves (`grain`) are " + std::to_string(grain) +
                "; they must be from 1 to " + std::to_string(options.batch.global()) +
                ", the samples of a batch; leave `grain` out for none");
  }
  const double checked = options.check_arithmetic;
  if (!(checked >= 0 && checked <= 1)) {
    throw Error("the fraction of the grains that is computed again (`check_arithmetic`) is " + number_text(checked) +
                "; it must be from 0, for none, to 1");
  }
  if (checked > 0 && grain == 0) {
    throw Error(
        "`check_arithmetic` compares grains that two devices compute, and this run has none; give a `grain`, such as "
        "32");
  }
  if (checked > 0 && options.split && !by_data_alone(*options.split)) {
    throw Error(
        "with `check_arithmetic` a device computes grains of others again, for which it needs the whole network; this "
        "run's is split as " +
        to_string(*options.split) + "; leave one of the two out");
  }
  if (grain == 0) return;
  const auto refuse = [](const std::string& why) {
    throw Error("`grain` gives the same bits on any number of devices, and " + why);
  };
  if (options.threads_per_rank > 1) {
    refuse("each grain is computed on one thread, while `threads_per_rank` is " +
           std::to_string(options.threads_per_rank) + "; take more devices in its place, as `devices` " +
           std::to_string(options.threads_per_rank) + "xcpu");
  }
  if (options.sync_batchnorm) {
    refuse("with `sync_batchnorm` a grain is normalised together with others; leave one of the two out");
  }
  if (options.exchange.compress != Compression::none) {
    refuse("`compress` " + std::string(to_string(options.exchange.compress)) +
           " rounds each device's gradients on their way; leave one of the two out");
  }
  if (options.exchange.sync_every > 0) {
    refuse("with `sync_every` each device takes steps of its own; leave one of the two out");
  }
  if (options.cuda_graph) {
    refuse("`cuda_graph` records a device's whole part of a batch at once; leave one of the two out");
  }
  if (!options.split) return;
  if (options.split->mesh.tensor > 1) {
    refuse("a split by channels (" + to_string(*options.split) +
           ") adds up products of slices in another order; take a split by data and layers");
  }
  if (options.split->microbatches > 1) {
    refuse("grains are a pipeline's microbatches, while this run's split is " + to_string(*options.split) +
           "; leave the microbatches out");
  }
}

std::string remark_on_idle_ranks(const BatchSettings& batch, int ranks) {
  if (batch.grain == 0) return "";
  const int64_t grains = (batch.global() + batch.grain - 1) / batch.grain;
  if (grains >= ranks) return "";
  return std::to_string(ranks - grains) + " of the " + std::to_string(ranks) +
         " ranks have nothing to do: a batch of " + std::to_string(batch.global()) + " samples has " +
         std::to_string(grains) + (grains == 1 ? " grain" : " grains") + " of " + std::to_string(batch.grain) +
         "; fewer `devices` are as fast, and a larger `batch_size` or a smaller `grain` gives them work";
}

}  // namespace lockstep
