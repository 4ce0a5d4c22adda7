#include "scheme.hpp"

#include <ATen/ops/tensor.h>
#include <torch/optim/sgd.h>
#include <lockstep/base/error.hpp>
#include <lockstep/data_parallel/optimizer.hpp>
#include <lockstep/devices/memory_format.hpp>
#include <lockstep/models/models.hpp>
#include <lockstep/ranks/traffic.hpp>
#include <lockstep/split/split_model.hpp>

#include <algorithm>
#include <chrono>
#include <limits>
#include <memory>
#include <mutex>
#include <vector>

#include "base/seconds_since.hpp"
#include "devices/memory_meter.hpp"
#include "ranks/observed_backend.hpp"
#include "ranks/rank_wait.hpp"

namespace lockstep::cli {

namespace {

using Clock = std::chrono::steady_clock;

constexpr int warm_up = 2;  // the first step learns the buckets' order, and makes the optimizer's state

int64_t state_bytes(const torch::optim::Optimizer& sgd) {
  int64_t bytes = 0;
  for (const auto& [parameter, state] : sgd.state()) {
    bytes += bytes_in({static_cast<const torch::optim::SGDParamState&>(*state).momentum_buffer()});
  }
  return bytes;
}

// Makes the network in the memory format that `lockstep train` gives it.
torch::nn::Sequential network(const ModelOptions& model, const Rank& rank) {
  auto net = make_model(model);
  set_memory_format(*net, fast_memory_format(model, rank.device()));
  return net;
}

struct Samples {
  std::vector<double> seconds;
  SchemeCost cost;
};

// `ledger` is shared by all ranks, since another rank's thread may free a message.
Samples train_on(Rank& world, const Scheme& scheme, const SchemeOptions& options, const Dataset& images,
                 const std::shared_ptr<MemoryLedger>& ledger) {
  MemoryMeter meter(ledger);
  auto traffic = std::make_shared<Traffic>();
  Rank rank = Traffic::observed(world, traffic);
  SplitModel net(network(options.model, rank), rank, scheme.split,
                 {.sharded = static_cast<Sharded>(scheme.zero_stage)});
  int64_t parameters = 0, buffers = 0;  // bytes that this rank holds
  Optimizer sgd(net, torch::optim::SGDOptions(options.lr).momentum(0.9), [&](const torch::nn::Module& part) {
    parameters = bytes_in(part.parameters());
    buffers = bytes_in(part.buffers());
    return Optimizer::Groups{torch::optim::OptimizerParamGroup(part.parameters())};
  });
  Samples samples;
  double last_loss = 0;
  int64_t most = 0;  // the most bytes, of all kinds
  int step = -warm_up;
  const BatchOptions order{.size = options.batch_size, .epoch = 1};
  const int64_t before = meter.current();
  const Batches all = batches(images.to(rank.device()), order, net.mesh().data());
  const int64_t of_data = meter.current() - before;  // all samples' order, and on a GPU the samples: no step's memory
  for (auto& batch : all) {
    if (step == options.steps) break;
    rank.barrier();
    synchronize_users(rank);
    *traffic = {};
    meter.reset_peak();
    const auto start = Clock::now();
    sgd.zero_grad();
    Loss loss = net.loss(batch, model_loss(options.model));
    loss.backward();
    samples.cost.gradients = bytes_in(sgd.gradients()) + (scheme.zero_stage == 1 ? parameters : 0);
    sgd.step();
    synchronize_users(rank);
    const double seconds = seconds_since(start);
    if (step >= 0) {
      samples.seconds.push_back(seconds);
      most = std::max(most, meter.peak() - of_data);
      samples.cost.idle_share += traffic->seconds / seconds / options.steps;
      samples.cost.bytes_sent = traffic->sent;
    }
    last_loss = loss.global_item();
    ++step;
  }
  samples.cost.final_loss = last_loss;
  samples.cost.parameters = (scheme.zero_stage == 3 ? bytes_in(sgd.param_groups()[0].params()) : parameters) + buffers;
  samples.cost.optimizer_state = state_bytes(sgd.inner());
  samples.cost.activations = most - samples.cost.memory();  // all other memory
  return samples;
}

// Takes the slowest rank's steps, and the fullest rank's memory.
void combine(Samples& all, const Samples& one) {
  if (all.seconds.empty()) {
    all = one;
    return;
  }
  for (size_t i = 0; i < all.seconds.size(); ++i) all.seconds[i] = std::max(all.seconds[i], one.seconds[i]);
  SchemeCost& to = all.cost;
  if (one.cost.memory() > to.memory()) {
    to.parameters = one.cost.parameters;
    to.gradients = one.cost.gradients;
    to.optimizer_state = one.cost.optimizer_state;
    to.activations = one.cost.activations;
  }
  to.bytes_sent = std::max(to.bytes_sent, one.cost.bytes_sent);
  to.idle_share += one.cost.idle_share;
}

}  // namespace

int64_t samples_needed(const SchemeOptions& options) {
  constexpr int64_t most = std::numeric_limits<int64_t>::max();
  const int64_t steps = int64_t{options.steps} + warm_up;
  return options.batch_size > most / steps ? most : options.batch_size * steps;
}

void check_images(const SchemeOptions& options, const Dataset& images) {
  if (samples_needed(options) <= images.size()) return;
  throw Error(std::to_string(options.steps) + " steps and " + std::to_string(warm_up) + " before them, of " +
              std::to_string(options.batch_size) + " samples each, need more " +
              (learns_text(options.model) ? "sequences" : "images") + " than there are, " +
              std::to_string(images.size()) + ". Take fewer steps or a smaller batch");
}

SchemeCost train_scheme(const Scheme& scheme, const SchemeOptions& options, const Dataset& images) {
  Samples all;
  std::mutex mutex;
  const auto ledger = std::make_shared<MemoryLedger>();
  run(scheme.devices,
      [&](Rank& rank) {
        const Samples samples = train_on(rank, scheme, options, images, ledger);
        const std::lock_guard lock(mutex);
        combine(all, samples);
      },
      {.threads_per_rank = options.threads_per_rank});
  all.cost.idle_share /= static_cast<double>(scheme.devices.size());
  std::sort(all.seconds.begin(), all.seconds.end());
  all.cost.step_seconds = all.seconds[all.seconds.size() / 2];
  return all.cost;
}

}  // namespace lockstep::cli
