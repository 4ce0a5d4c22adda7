// Labels: simulated
// What a step of training costs a GPU's host, as numbers: how often it waits, and how many kernels it launches. A
// change of one of these numbers may be right, but nobody should make it without knowing.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/data/data.hpp>
#include <lockstep/trainer/trainer.hpp>

#include "support/simulated_device.hpp"
#include "trainer/rank_trainer.hpp"

#include <cstdint>
#include <string>

namespace cost_test {

using lockstep::Devices;
using lockstep::OptimizerKind;
using lockstep::Rank;
using lockstep::TrainOptions;

struct Cost {
  int64_t host_waits = 0, launches = 0;
};

// Of all ranks together, in an epoch of so many steps that is not the first.
Cost cost_of_epoch(TrainOptions options, int64_t steps) {
  options.batch.size = 8;
  options.epochs = 2;
  const auto data = lockstep::synthetic_images(steps * options.batch.size, 8);
  Cost cost;
  lockstep::run(options.devices, [&](Rank& rank) {
    const lockstep::TrainCallbacks callbacks;
    lockstep::RankTrainer trainer(options, callbacks, data, rank, nullptr, nullptr);
    trainer.epoch(1);
    Cost before;
    rank.barrier();
    if (rank.index() == 0) before = {lockstep::simulated::host_waits(), lockstep::simulated::launches()};
    rank.barrier();
    trainer.epoch(2);
    rank.barrier();
    if (rank.index() != 0) return;
    cost = {lockstep::simulated::host_waits() - before.host_waits, lockstep::simulated::launches() - before.launches};
  });
  return cost;
}

// What an epoch itself costs is in both epochs, and so is what its first steps find out.
Cost cost_of_step(const TrainOptions& options) {
  const Cost few = cost_of_epoch(options, 4), many = cost_of_epoch(options, 8);
  EXPECT_EQ((many.host_waits - few.host_waits) % 4, 0);
  EXPECT_EQ((many.launches - few.launches) % 4, 0);
  return {(many.host_waits - few.host_waits) / 4, (many.launches - few.launches) / 4};
}

// Without the look at each step's gradients, for which the host waits (FiniteWatch).
TrainOptions training(const std::string& model, int gpus = 1) {
  TrainOptions options;
  options.on_nan = lockstep::OnNan::go_on;
  options.model.name = model;
  if (model != "lenet") options.model.width = 0.0625;
  for (int i = 0; i < gpus; ++i) options.devices.emplace_back(torch::kCUDA, static_cast<c10::DeviceIndex>(i));
  return options;
}

TEST(HostWaitsOfAStep, AreNoneHoweverTheDataAreSplit) {
  for (const int gpus : {1, 2}) EXPECT_EQ(cost_of_step(training("lenet", gpus)).host_waits, 0) << gpus;
}

TEST(HostWaitsOfAStep, AreNoneWithASplitByChannels) {
  TrainOptions options = training("lenet", 2);
  options.split = lockstep::ModelSplit{.mesh = {.tensor = 2}};
  EXPECT_EQ(cost_of_step(options).host_waits, 0);
}

TEST(HostWaitsOfAStep, AreNoneWithShardedOptimizers) {
  for (const int stage : {1, 2}) {
    TrainOptions options = training("lenet", 2);
    options.exchange.zero_stage = stage;
    EXPECT_EQ(cost_of_step(options).host_waits, 0) << stage;
  }
}

// The look is at the step before, yet the host waits for all that it has queued since.
TEST(HostWaitsOfAStep, IsOneOfEachRankThatStopsAtWhatIsNotFinite) {
  for (const int gpus : {1, 2}) {
    TrainOptions options = training("lenet", gpus);
    options.on_nan = lockstep::OnNan::stop;
    EXPECT_EQ(cost_of_step(options).host_waits, gpus);
  }
}

TEST(HostWaitsOfAStep, AreNoneInAPipeline) {
  TrainOptions options = training("lenet", 2);
  options.split = lockstep::ModelSplit{.mesh = {.pipeline = 2}, .microbatches = 4};
  EXPECT_EQ(cost_of_step(options).host_waits, 0);
}

int64_t launches(const std::string& model, OptimizerKind optimizer) {
  TrainOptions options = training(model);
  options.optimizer.kind = optimizer;
  return cost_of_step(options).launches;
}

TEST(LaunchesOfAStep, OfLeNet) {
  EXPECT_EQ(launches("lenet", OptimizerKind::sgd), 58);
  EXPECT_EQ(launches("lenet", OptimizerKind::adamw), 121);
}

TEST(LaunchesOfAStep, OfResNet18) {
  EXPECT_EQ(launches("resnet18", OptimizerKind::sgd), 299);
  EXPECT_EQ(launches("resnet18", OptimizerKind::adamw), 794);
}

}  // namespace cost_test
