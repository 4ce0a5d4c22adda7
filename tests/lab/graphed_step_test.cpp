// Labels: concurrency
// GraphedStep: which steps are recorded and replayed, and what they read. On a stand-in for the graph: see
// gpu_test.cpp.
#include "lab/graphed_step.hpp"
#include "data/parts.hpp"

#include <gmock/gmock.h>
#include <torch/torch.h>

#include "support/error_of.hpp"
#include "support/fake_graph.hpp"
#include "support/test_devices.hpp"

#include <atomic>
#include <chrono>
#include <thread>

namespace graphed_step_test {

using lockstep::Batch;
using lockstep::Error;
using lockstep::error_of;
using lockstep::Fails;
using lockstep::FakeGraph;
using lockstep::GraphedStep;
using lockstep::kWarmUpSteps;
using lockstep::Rank;
using testing::ElementsAre;

Batch batch_of(float value, int64_t global_size, const Rank& rank) {
  const auto size = lockstep::part_of(global_size, rank.index(), rank.world_size()).size();
  return {.x = torch::full({size, 2}, value),
          .y = torch::full({size}, value),
          .global_size = global_size,
          .more = {{"weight", torch::full({size}, value)}}};
}

TEST(GraphedStep, ReplaysFullBatchesAfterTheWarmUpFromTensorsOfItsOwn) {
  lockstep::run(lockstep::test_devices(2), [](Rank& rank) {
    std::vector<float> seen;
    std::vector<const void*> places;
    int replays = 0;
    const auto step = [&](const Batch& batch) {
      EXPECT_EQ(batch.x.sizes(), (std::vector<int64_t>{3, 2}));
      EXPECT_EQ(batch.y[0].item<float>(), batch.x[0][0].item<float>());
      EXPECT_EQ(batch["weight"][0].item<float>(), batch.x[0][0].item<float>());
      seen.push_back(batch.x[0][0].item<float>());
      places.push_back(batch.x.const_data_ptr());
    };
    GraphedStep graphed(rank, std::make_unique<FakeGraph>(&replays), 6, /*collective=*/false, step);
    for (int i = 0; i < kWarmUpSteps; ++i) EXPECT_FALSE(graphed.replay(batch_of(1, 6, rank), 0));
    EXPECT_FALSE(graphed.replay(batch_of(2, 5, rank), 0));  // not full, and no warm-up either
    EXPECT_TRUE(graphed.replay(batch_of(3, 6, rank), 0));
    EXPECT_TRUE(graphed.replay(batch_of(4, 6, rank), 0));
    EXPECT_FALSE(graphed.replay(batch_of(5, 1, rank), 0));
    EXPECT_TRUE(graphed.replay(batch_of(6, 6, rank), 0));
    EXPECT_EQ(replays, 3);
    EXPECT_THAT(seen, ElementsAre(3, 4, 6));
    EXPECT_THAT(places, testing::Each(places[0]));
  });
}

TEST(GraphedStep, RecordsOneRankAfterTheOtherUnlessTheStepIsCollective) {
  struct Slow : FakeGraph {
    explicit Slow(std::atomic<int>& recording, std::atomic<int>& most) : recording_(recording), most_(most) {}
    void record(const std::function<void()>& work) override {
      const int now = ++recording_;
      for (int seen = most_; seen < now && !most_.compare_exchange_weak(seen, now);) continue;
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      --recording_;
      FakeGraph::record(work);
    }
    std::atomic<int>&recording_, &most_;
  };
  for (const bool collective : {false, true}) {
    std::atomic<int> recording = 0, most = 0;
    lockstep::run(lockstep::test_devices(3), [&](Rank& rank) {
      GraphedStep graphed(rank, std::make_unique<Slow>(recording, most), 6, collective, [](const Batch&) {});
      rank.barrier();
      for (int i = 0; i <= kWarmUpSteps; ++i) graphed.replay(batch_of(1, 6, rank), 0);
    });
    if (collective) {
      EXPECT_GT(most, 1);
    } else {
      EXPECT_EQ(most, 1);
    }
  }
}

TEST(GraphedStep, SaysWhichRankCouldNotRecord) {
  struct Broken : FakeGraph {
    void record(const std::function<void()>&) override { throw std::runtime_error("a kernel of the old kind"); }
  };
  const auto text = error_of([] {
    lockstep::run(lockstep::test_devices(1), [](Rank& rank) {
      GraphedStep graphed(rank, std::make_unique<Broken>(), 4, false, [](const Batch&) {});
      for (int i = 0; i <= kWarmUpSteps; ++i) graphed.replay(batch_of(1, 4, rank), 0);
    });
  });
  EXPECT_THAT(text, Fails(Error::user_code));
}

}  // namespace graphed_step_test
