#include "communication_options.hpp"

#include <lockstep/base/error.hpp>
#include <lockstep/data_parallel/half_precision_hook.hpp>
#include <lockstep/data_parallel/power_sgd.hpp>

#include "train_options.hpp"

#include <cmath>
#include <sstream>

namespace lockstep {
namespace {

PowerSgdOptions power_sgd_options(const TrainOptions& options) {
  PowerSgdOptions power_sgd{.seed = options.seed};
  if (options.compress_rank > 0) power_sgd.rank = options.compress_rank;
  return power_sgd;
}

void check_compression(const TrainOptions& options) {
  const Compression compress = options.compress;
  if (options.compress_rank < 0) {
    throw Error("the rank of compressed gradients (`compress_rank`) is " + std::to_string(options.compress_rank) +
                "; it must be at least 1");
  }
  if (options.compress_rank > 0 && compress != Compression::powersgd) {
    throw Error("`compress_rank` goes with `compress` powersgd, and this run has `compress` " +
                std::string(to_string(compress)));
  }
  if (compress != Compression::none && options.cuda_graph) {
    throw Error("`cuda_graph` records steps whose gradients are averaged as they are; leave it or `compress` out");
  }
  if (compress == Compression::powersgd && options.split && !by_data_alone(*options.split)) {
    throw Error("`compress` powersgd compresses whole layers' gradients, and this run's network is split as " +
                to_string(*options.split) + ", not by data alone; take bf16 or fp16, or leave one of the two out");
  }
}

void check_outer_optimizer(const TrainOptions& options) {
  const auto refuse = [](const char* what, double value, const char* rule) {
    std::ostringstream text;
    text << what << " is " << value << "; it must be " << rule;
    throw Error(text.str());
  };
  if (options.sync_every < 0) {
    throw Error("the number of steps between averages (`sync_every`) is " + std::to_string(options.sync_every) +
                "; it must be at least 1");
  }
  if (!(options.outer_lr > 0) || std::isinf(options.outer_lr)) {
    refuse("the outer learning rate (`outer_lr`)", options.outer_lr, "above 0");
  }
  if (!(options.outer_momentum >= 0 && options.outer_momentum < 1)) {
    refuse("the outer momentum (`outer_momentum`)", options.outer_momentum, "from 0 to below 1");
  }
  if (options.sync_every == 0 && (options.outer_lr != 1 || options.outer_momentum != 0)) {
    throw Error("`outer_lr` and `outer_momentum` are of what `sync_every` does; give that too, or leave them out");
  }
}

}  // namespace

void check_communication(const TrainOptions& options) {
  check_compression(options);
  check_outer_optimizer(options);
  if (options.sync_every == 0) return;
  const auto refuse = [](const std::string& why) {
    throw Error("`sync_every`: " + why + "; leave one of the two out");
  };
  if (options.compress != Compression::none) refuse("no gradients are exchanged that `compress` could make smaller");
  if (options.cuda_graph) refuse("a step of `cuda_graph` is always the same, and not every H-th one another");
  if (options.sync_batchnorm) refuse("`sync_batchnorm` exchanges statistics at every step");
  if (options.checkpoint_every > 0) {
    refuse(
        "between two averages the ranks' parameters differ, and `checkpoint_every` wants to keep one network there "
        "(at the end of each epoch there is one)");
  }
  if (options.split && !by_data_alone(*options.split)) {
    refuse("ranks take steps of the whole network by themselves, and this run's is split as " +
           to_string(*options.split) + ", not by data alone");
  }
}

std::shared_ptr<CommunicationHook> make_communication_hook(const TrainOptions& options) {
  if (options.compress == Compression::bf16) return std::make_shared<HalfPrecisionHook>(at::kBFloat16);
  if (options.compress == Compression::fp16) return std::make_shared<HalfPrecisionHook>(at::kHalf);
  if (options.compress == Compression::powersgd) return std::make_shared<PowerSgdHook>(power_sgd_options(options));
  return nullptr;
}

LocalSgdOptions local_sgd_options(const TrainOptions& options) {
  return {.sync_every = options.sync_every, .outer_lr = options.outer_lr, .outer_momentum = options.outer_momentum};
}

std::string communication_text(const TrainOptions& options) {
  std::ostringstream text;
  if (options.compress == Compression::powersgd) {
    text << "gradients by PowerSGD, rank " << power_sgd_options(options).rank;
  } else if (options.compress != Compression::none) {
    text << "gradients in " << to_string(options.compress);
  }
  if (options.sync_every > 0) {
    text << "parameters every " << options.sync_every << (options.sync_every == 1 ? " step" : " steps");
    if (options.outer_lr != 1 || options.outer_momentum != 0) {
      text << ", outer learning rate " << options.outer_lr << ", outer momentum " << options.outer_momentum;
    }
  }
  return text.str();
}

}  // namespace lockstep
