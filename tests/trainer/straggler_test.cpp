// Labels: concurrency
// A rank or a stage that the others wait for is named with times, however the network is split, and nobody else is.
#include "trainer/straggler.hpp"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <gmock/gmock.h>
#include <torch/torch.h>

#include "support/simulated_device.hpp"
#include "support/test_devices.hpp"
#include "trainer/rank_trainer.hpp"
#include "trainer/wait_clock.hpp"
#include "trainer/workload.hpp"

#include <chrono>
#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace straggler_test {

using lockstep::MeshShape;
using lockstep::ModelSplit;
using lockstep::Rank;
using lockstep::RankTime;
using lockstep::TrainOptions;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;

constexpr int kSlow = 300;  // ms per step; an epoch has five

// Keeps a rank busy: on the CPU its thread, on a simulated GPU the stream alone.
void compute_for(std::chrono::milliseconds time, const c10::Device& device) {
  const auto sleep = [time] { std::this_thread::sleep_for(time); };
  if (device.is_cpu() || !lockstep::simulated::is_there()) return sleep();
  const auto stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  lockstep::simulated::queue(device.index(), stream.id(), sleep);
}

// Gives what is said after an epoch in which rank `slow` of so many is slow, when it has a gradient of the first
// layer. The rank has `backwards` of these in a step.
std::string said(const TrainOptions& options, size_t ranks, int slow, int backwards) {
  const auto data = lockstep::synthetic_images(150, 40);
  std::string text;
  lockstep::run(lockstep::test_devices(ranks), [&](Rank& rank) {
    const lockstep::TrainCallbacks callbacks;
    auto task = task_of(options, data);
    task.optimizer = [&](const lockstep::Task::Groups& groups) {
      if (rank.index() == slow) {
        groups[0].params()[0].register_hook([time = std::chrono::milliseconds(kSlow / backwards),
                                             device = rank.device()](const auto&) { compute_for(time, device); });
      }
      return std::make_unique<torch::optim::SGD>(groups, torch::optim::SGDOptions(0.01));
    };
    lockstep::RankTrainer trainer(options, callbacks, task, rank, nullptr, nullptr);
    trainer.epoch(1);
    const std::string here = trainer.straggler();
    if (rank.index() == 0) text = here;
  });
  return text;
}

constexpr int kMicrobatches = 2;

TrainOptions options_of(const MeshShape& mesh) {
  TrainOptions options{.model = {.name = "mlp", .width = 0.125}, .batch = {.size = 32}};
  options.way = lockstep::SplitNetwork{{.mesh = mesh, .microbatches = mesh.pipeline > 1 ? kMicrobatches : 1}};
  return options;
}

std::string name_of(int rank, size_t ranks) {
  return "rank " + std::to_string(rank) + " (" + lockstep::test_devices(ranks)[static_cast<size_t>(rank)].str() + ")";
}

TEST(SlowRank, IsNamedAmongReplicas) {
  EXPECT_THAT(said(options_of({.data = 3}), 3, 1, 1),
              AllOf(StartsWith(name_of(1, 3) + " is slow: it computed for 1."),
                    HasSubstr(" s per epoch, where others take 0."), HasSubstr(" s for as many samples")));
}

TEST(SlowRank, IsNamedAmongPartsOfTheSameLayers) {
  EXPECT_THAT(said(options_of({.pipeline = 2, .tensor = 2}), 4, 3, kMicrobatches),
              AllOf(StartsWith(name_of(3, 4) + " is slow: it computed for 1."),
                    HasSubstr(" s per epoch, where others of its stage take 0.")));
}

TEST(SlowRank, OfAPipelineIsNamedWithAllStagesSeconds) {
  EXPECT_THAT(said(options_of({.pipeline = 3}), 3, 0, kMicrobatches),
              AllOf(StartsWith("stage 0 of the pipeline (" + name_of(0, 3) + ") made the others wait"),
                    HasSubstr("stage 0: 1."), HasSubstr("stage 1: 0."), HasSubstr("stage 2: 0.")));
}

// On a GPU a grain's sums go over several streams.
TEST(SlowRank, IsNamedWithGrains) {
  TrainOptions options = options_of({.data = 2});
  options.batch.grain = 8;
  EXPECT_THAT(said(options, 2, 0, /*backwards=*/2),
              AllOf(StartsWith(name_of(0, 2) + " is slow: it computed for 1."), HasSubstr("where others take 0.")));
}

// ---- What is slow enough.

std::vector<std::string> names_of(size_t ranks) {
  std::vector<std::string> names;
  for (size_t rank = 0; rank < ranks; ++rank) names.push_back("rank " + std::to_string(rank));
  return names;
}

std::string told(const std::vector<RankTime>& ranks, const ModelSplit& split) {
  return lockstep::straggler_of(ranks, /*epochs=*/2, names_of(ranks.size()), split);
}

TEST(Straggler, IsSlowPerSampleAndMakesOthersWait) {
  const ModelSplit by_data{.mesh = {.data = 3}};
  EXPECT_EQ(told({{8, 100}, {80, 100}, {10, 100}}, by_data),
            "rank 1 is slow: it computed for 40.00 s per epoch, where others take 5.00 s for as many samples; they "
            "waited for it");
  EXPECT_EQ(told({{8, 100}, {29, 100}, {10, 100}}, by_data), "");      // not three times as long
  EXPECT_EQ(told({{8, 100}, {80, 1000}, {10, 100}}, by_data), "");     // it has more to do
  EXPECT_EQ(told({{0.1, 100}, {1.9, 100}, {0.1, 100}}, by_data), "");  // less than a second per epoch
  EXPECT_EQ(told({{0, 0}, {80, 100}, {0, 0}}, by_data), "");           // the others have nothing to do
  constexpr double unknown = std::numeric_limits<double>::quiet_NaN();
  EXPECT_EQ(told({{unknown, 100}, {8, 100}, {80, 100}}, by_data), "");
  EXPECT_EQ(lockstep::straggler_of({}, 0, {}, {}), "");
}

// Ranks 0 and 2 have stage 0, which is the larger one; ranks 1 and 3 have stage 1.
TEST(Straggler, IsComparedWithRanksOfItsStage) {
  const ModelSplit split{.mesh = {.data = 2, .pipeline = 2}};
  EXPECT_EQ(told({{40, 100}, {10, 100}, {42, 100}, {38, 100}}, split),
            "rank 3 is slow: it computed for 19.00 s per epoch, where others of its stage take 5.00 s for as many "
            "samples; they waited for it");
  EXPECT_EQ(told({{20, 100}, {10, 100}, {20, 100}, {10, 100}}, split), "");
}

TEST(Straggler, MayBeAStage) {
  EXPECT_EQ(told({{4, 100}, {4, 100}, {24, 100}, {4, 100}, {4, 100}, {26, 100}}, {.mesh = {.data = 2, .pipeline = 3}}),
            "stage 2 of the pipeline (rank 2, rank 5) made the others wait; computing took per epoch: stage 0: 2.00 s; "
            "stage 1: 2.00 s; stage 2: 12.50 s. Either the device there is slow, or it has too much of the network. "
            "`lockstep plan` measures each layer, and `split` takes its division");
  EXPECT_EQ(told({{4, 100}, {11, 100}}, {.mesh = {.pipeline = 2}}), "");
  EXPECT_EQ(told({{0.2, 100}, {2, 100}}, {.mesh = {.pipeline = 2}}), "");
  EXPECT_THAT(told({{4, 100}, {14, 100}}, {.mesh = {.pipeline = 2}, .stages_per_rank = 2}),
              AllOf(StartsWith("stages 1, 3 of the pipeline (rank 1)"), HasSubstr("stages 0, 2: 2.00 s")));
}

// ---- The clock.

TEST(WaitClock, LeavesOutWhatIsSpentInAPause) {
  lockstep::WaitClock clock(c10::kCPU);
  clock.spent(1);
  EXPECT_EQ(clock.seconds(), 0);
  clock.start();
  clock.spent(2);
  clock.pause();
  clock.spent(4);
  EXPECT_EQ(clock.seconds(), 2);
  clock.reset();
  EXPECT_EQ(clock.seconds(), 0);
}

// Such as this type, which computes nothing.
TEST(WaitClock, SaysSoIfADeviceHasNoEvents) {
  lockstep::WaitClock clock(c10::kMeta);
  clock.start();
  EXPECT_EQ(clock.seconds(), 0);
  clock.waits();
  clock.spent(1);
  EXPECT_TRUE(std::isnan(clock.seconds()));
}

}  // namespace straggler_test
