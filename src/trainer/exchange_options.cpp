#include "exchange_options.hpp"

#include <lockstep/base/error.hpp>
#include <lockstep/lab/half_precision_hook.hpp>
#include <lockstep/lab/optimizers.hpp>
#include <lockstep/lab/power_sgd.hpp>

#include "base/classic.hpp"
#include "base/names.hpp"
#include "train_options.hpp"

#include <array>
#include <cmath>

namespace lockstep {
namespace {

constexpr std::array compressions{std::pair{Compression::none, "none"}, std::pair{Compression::bf16, "bf16"},
                                  std::pair{Compression::fp16, "fp16"}, std::pair{Compression::powersgd, "powersgd"}};

int64_t power_sgd_rank(const ExchangeOptions& exchange) {
  return exchange.compress_rank > 0 ? exchange.compress_rank : PowerSgdOptions().rank;
}

void check_compression(const TrainOptions& options) {
  const Compression compress = options.exchange.compress;
  if (options.exchange.compress_rank < 0) {
    throw Error("the rank of compressed gradients (`compress_rank`) is " +
                std::to_string(options.exchange.compress_rank) + "; it must be at least 1");
  }
  if (options.exchange.compress_rank > 0 && compress != Compression::powersgd) {
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

void check_outer_optimizer(const ExchangeOptions& exchange) {
  const auto refuse = [](const char* what, double value, const char* rule) {
    Classic<std::ostringstream> text;
    text << what << " is " << value << "; it must be " << rule;
    throw Error(text.str());
  };
  if (exchange.sync_every < 0) {
    throw Error("the number of steps between averages (`sync_every`) is " + std::to_string(exchange.sync_every) +
                "; it must be at least 1");
  }
  if (!(exchange.outer_lr > 0) || std::isinf(exchange.outer_lr)) {
    refuse("the outer learning rate (`outer_lr`)", exchange.outer_lr, "above 0");
  }
  if (!(exchange.outer_momentum >= 0 && exchange.outer_momentum < 1)) {
    refuse("the outer momentum (`outer_momentum`)", exchange.outer_momentum, "from 0 to below 1");
  }
  if (exchange.sync_every == 0 && (exchange.outer_lr != 1 || exchange.outer_momentum != 0)) {
    throw Error("`outer_lr` and `outer_momentum` are of what `sync_every` does; give that too, or leave them out");
  }
}

void check_zero(const TrainOptions& options) {
  const int stage = options.exchange.zero_stage;
  if (stage < 0 || stage > 3) {
    throw Error("the stage of ZeRO (`zero_stage`) is " + std::to_string(stage) +
                "; it must be 0 (off), 1 (optimizer state), 2 (and gradients) or 3 (and parameters)");
  }
  if (stage == 0) return;
  if (needs_whole_layers(options.optimizer.kind)) {
    throw Error("`zero_stage` gives each rank a slice of the parameters, and " +
                std::string(to_string(options.optimizer.kind)) +
                " scales a layer's update by the norm of the whole layer; take sgd, adam or adamw, or leave it out");
  }
  if (options.cuda_graph) {
    throw Error(
        "`zero_stage` exchanges parameters behind the steps that `cuda_graph` records; leave one of the two out");
  }
  if (stage > 1 && options.sync_batchnorm) {
    throw Error("`zero_stage` " + std::to_string(stage) +
                " waits for other devices within backward, and so does `sync_batchnorm`; take 1, or leave one of the "
                "two out");
  }
  if (stage == 3 && options.check_arithmetic > 0) {
    throw Error(
        "with `check_arithmetic` a device computes grains of others again, for which it needs all parameters, and with "
        "`zero_stage` 3 it keeps a slice of them; take 2, or leave one of the two out");
  }
  if (options.exchange.compress != Compression::none || options.exchange.sync_every > 0) {
    throw Error(
        "`zero_stage` exchanges gradients in its own way, of which `compress` and `sync_every` know nothing; "
        "leave it or them out");
  }
  if (options.split && !by_data_alone(*options.split)) {
    throw Error("`zero_stage` shares out what ranks split by data have in common, and this run's network is split as " +
                to_string(*options.split) + "; leave one of the two out");
  }
}

}  // namespace

std::string_view to_string(Compression compression) {
  return name_in(compressions, compression);
}

Compression compression_from(std::string_view name) {
  return value_in(compressions, name, "the compression of gradients");
}

void check_exchange(const TrainOptions& options) {
  check_zero(options);
  check_compression(options);
  check_outer_optimizer(options.exchange);
  if (options.exchange.sync_every == 0) return;
  const auto refuse = [](const std::string& why) {
    throw Error("`sync_every`: " + why + "; leave one of the two out");
  };
  if (options.exchange.compress != Compression::none)
    refuse("no gradients are exchanged that `compress` could make smaller");
  if (options.cuda_graph) refuse("a step of `cuda_graph` is always the same, and not every H-th one another");
  if (options.sync_batchnorm) refuse("`sync_batchnorm` exchanges statistics at every step");
  if (options.keep.every > 0) {
    refuse(
        "between two averages the ranks' parameters differ, and `checkpoint_every` wants to keep one network there "
        "(at the end of each epoch there is one)");
  }
  if (options.split && !by_data_alone(*options.split)) {
    refuse("ranks take steps of the whole network by themselves, and this run's is split as " +
           to_string(*options.split) + ", not by data alone");
  }
}

std::shared_ptr<CommunicationHook> make_communication_hook(const ExchangeOptions& exchange, uint64_t seed) {
  if (exchange.compress == Compression::bf16) return std::make_shared<HalfPrecisionHook>(at::kBFloat16);
  if (exchange.compress == Compression::fp16) return std::make_shared<HalfPrecisionHook>(at::kHalf);
  if (exchange.compress != Compression::powersgd) return nullptr;
  return std::make_shared<PowerSgdHook>(PowerSgdOptions{.rank = power_sgd_rank(exchange), .seed = seed});
}

LocalSgdOptions local_sgd_options(const ExchangeOptions& exchange) {
  return {.sync_every = exchange.sync_every, .outer_lr = exchange.outer_lr, .outer_momentum = exchange.outer_momentum};
}

std::string exchange_text(const ExchangeOptions& exchange) {
  Classic<std::ostringstream> text;
  if (exchange.compress == Compression::powersgd) {
    text << "gradients by PowerSGD, rank " << power_sgd_rank(exchange);
  } else if (exchange.compress != Compression::none) {
    text << "gradients in " << to_string(exchange.compress);
  }
  if (exchange.sync_every > 0) {
    text << "parameters every " << exchange.sync_every << (exchange.sync_every == 1 ? " step" : " steps");
    if (exchange.outer_lr != 1 || exchange.outer_momentum != 0) {
      text << ", outer learning rate " << exchange.outer_lr << ", outer momentum " << exchange.outer_momentum;
    }
  }
  return text.str();
}

}  // namespace lockstep
