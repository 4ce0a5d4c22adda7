// Labels: concurrency
// lockstep train's --balance: the results of equal parts, in other parts; and what it cannot be combined with.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/trainer/trainer.hpp>

#include "support/error_of.hpp"
#include "support/small_training.hpp"
#include "support/test_devices.hpp"
#include "trainer/rank_trainer.hpp"
#include "trainer/run_state.hpp"
#include "trainer/workload.hpp"

#include <algorithm>
#include <functional>
#include <numeric>
#include <string_view>

namespace lockstep {
namespace balance_trainer_test {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

class BalancedTrainer : public SmallTraining {
 protected:
  BalancedTrainer() : SmallTraining(460) {}

  // Two epochs of 28 full batches and a smaller one; nothing is kept.
  TrainOptions options(int ranks, const std::string& balance) const {
    TrainOptions options = SmallTraining::options(ranks, "");
    options.batch.size = 16;
    options.epochs = 2;
    options.batch.balance = balance_rule_from(balance);
    options.keep.run_dir.clear();
    return options;
  }

  static void expect_near(const TrainResult& result, const TrainResult& expected) {
    ASSERT_EQ(result.history.size(), expected.history.size());
    for (size_t i = 0; i < result.history.size(); ++i) {
      EXPECT_NEAR(result.history[i].train_loss, expected.history[i].train_loss, 1e-4);
      EXPECT_NEAR(result.history[i].train_accuracy, expected.history[i].train_accuracy, 1.01 / 460);
    }
  }
};

TEST_F(BalancedTrainer, TrainsTheSameWhateverTheParts) {
  const TrainResult expected = train(options(1, "equal"));
  EXPECT_THAT(expected.history[1].parts, IsEmpty());
  for (const auto& [shares, parts] : std::vector<std::pair<std::string, std::vector<int64_t>>>{
           {"3,1", {12, 4}}, {"0,1", {0, 16}}, {"1,0.5,1.5", {5, 3, 8}}}) {
    SCOPED_TRACE(shares);
    const TrainResult result = train(options(static_cast<int>(parts.size()), shares));
    expect_near(result, expected);
    EXPECT_EQ(result.history[1].parts, parts);
  }
  TrainOptions split = options(4, "3,1");
  split.way = SplitNetwork{{.mesh = {.data = 2, .pipeline = 2}, .microbatches = 2}};
  const TrainResult result = train(split);
  expect_near(result, expected);
  EXPECT_THAT(result.history[0].parts, ElementsAre(12, 4));
}

TEST_F(BalancedTrainer, SoDoPartsThatFollowTheSpeed) {
  const TrainResult expected = train(options(1, "equal"));
  TrainOptions automatic = options(3, "auto");
  automatic.keep.run_dir = runs_ / "run";
  automatic.batch.accumulate = 2;
  const TrainResult result = train(automatic);
  expect_near(result, expected);
  const auto kept = read_metrics(runs_ / "run" / "metrics.jsonl");
  for (size_t epoch = 0; epoch < 2; ++epoch) {
    const auto& parts = result.history[epoch].parts;
    EXPECT_EQ(parts.size(), 3u);
    EXPECT_EQ(std::accumulate(parts.begin(), parts.end(), int64_t{0}), 16);
    EXPECT_EQ(kept[epoch].parts, parts);
  }
  EXPECT_THAT(train(options(1, "auto")).history[1].parts, ElementsAre(16));
}

TEST_F(BalancedTrainer, ARunThatGoesOnWithinAnEpochMayHaveOtherParts) {
  const TrainResult expected = train(options(1, "equal"));
  TrainOptions first = options(2, "3,1");
  first.keep.run_dir = runs_ / "first";
  first.keep.checkpoints = {.last = 100, .every = 5};
  train(first);
  const auto checkpoint = runs_ / "first" / "checkpoints" / "epoch-0000-step-000005.safetensors";
  const auto totals = tensors_under("ranks", read_run_state(checkpoint).tensors);
  const auto samples = std::find_if(totals.begin(), totals.end(), [](auto& entry) { return entry.first == "totals"; });
  ASSERT_NE(samples, totals.end());
  EXPECT_TRUE(samples->second.select(1, 2).equal(5 * torch::tensor({12.0, 4.0}, torch::kDouble)));
  for (const std::string balance : {"auto", "1,3", "equal"}) {
    SCOPED_TRACE(balance);
    TrainOptions second = options(2, balance);
    second.keep.resume = checkpoint;
    expect_near(train(second), expected);
  }
}

// Simulated time on a rank's thread: it passes when a batch is gathered and when the loss of a part is computed that a
// backward follows, and nowhere else.
class SimulatedTime {
 public:
  SimulatedTime(double per_sample, double per_gathered_batch)
      : per_sample_(per_sample),
        per_gathered_batch_(per_gathered_batch),
        handle_(at::addThreadLocalCallback(
            at::RecordFunctionCallback(notice).needsInputs(true).scopes({at::RecordScope::FUNCTION}))) {
    here = this;
  }
  ~SimulatedTime() {
    at::removeCallback(handle_);
    here = nullptr;
  }
  SimulatedTime(const SimulatedTime&) = delete;
  SimulatedTime& operator=(const SimulatedTime&) = delete;

  double now() const { return now_; }
  const std::vector<int64_t>& parts() const { return parts_; }  // parts whose losses were computed

 private:
  static std::unique_ptr<at::ObserverContext> notice(const at::RecordFunction& call) {
    const std::string_view name = call.name();
    if (name == "aten::index_select" && call.inputs()[0].toTensor().dim() == 1) {  // the labels
      here->now_ += here->per_gathered_batch_;
    } else if (name == "aten::cross_entropy_loss" && torch::GradMode::is_enabled()) {
      here->parts_.push_back(call.inputs()[0].toTensor().size(0));
      here->now_ += here->per_sample_ * static_cast<double>(here->parts_.back());
    }
    return nullptr;
  }

  static thread_local SimulatedTime* here;

  const double per_sample_, per_gathered_batch_;
  const at::CallbackHandle handle_;
  double now_ = 0;
  std::vector<int64_t> parts_;
};

thread_local SimulatedTime* SimulatedTime::here = nullptr;

constexpr int64_t samples = 11 * 48 + 24;  // eleven full batches and half a batch

TrainOptions automatic() {
  TrainOptions options;
  options.model.name = "mlp";
  options.model.width = 0.125;
  options.batch.size = 48;
  options.rate.lr = 0.05;
  options.batch.balance = PartsBySpeed();
  return options;
}

TEST(RankTrainerBalance, ARankOfHalfTheSpeedTrainsHalfAsMuchAndTheWeightsAreThoseOfOneRank) {
  const auto data = synthetic_images(samples, 40);
  const TrainOptions options = automatic();
  const TrainCallbacks callbacks;
  const auto train_on = [&](int ranks, std::vector<std::vector<int64_t>>& parts) {
    std::vector<torch::Tensor> weights;
    parts.resize(static_cast<size_t>(ranks));
    run(test_devices(ranks), [&](Rank& rank) {
      SimulatedTime time(rank.index() == 1 ? 1e-3 : 0.5e-3, 0);
      RankTrainer trainer(options, callbacks, task_of(options, data), rank, nullptr, nullptr, nullptr,
                          {.clock = [&] { return time.now(); }});
      for (int epoch = 1; epoch <= 2; ++epoch) {
        const EpochMetrics metrics = trainer.epoch(epoch);
        if (ranks == 2) EXPECT_THAT(metrics.parts, ElementsAre(32, 16)) << epoch;
      }
      parts[static_cast<size_t>(rank.index())] = time.parts();
      if (rank.index() == 0) weights = trainer.whole()->parameters();
    });
    return weights;
  };
  std::vector<std::vector<int64_t>> of_one, of_two;
  const auto expected = train_on(1, of_one), weights = train_on(2, of_two);
  ASSERT_EQ(of_one[0].size(), 24u);
  for (size_t step = 0; step < 24; ++step) {
    const int64_t slow = (step < 10 ? of_one[0][step] / 2 : of_one[0][step] / 3);
    EXPECT_EQ(of_two[0].at(step), of_one[0][step] - slow) << step;
    EXPECT_EQ(of_two[1].at(step), slow) << step;
  }
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_TRUE(torch::allclose(weights[i], expected[i], 1e-4, 1e-6)) << "weight " << i;
  }
}

// Rank 1 takes as long to gather a batch as to compute a part of one, so its laps are twice as long as rank 0's.
TEST(RankTrainerBalance, WhatARunThatGoesOnHasToSkipIsNoLap) {
  const auto data = synthetic_images(samples, 40);
  TrainOptions options = automatic();
  options.keep.checkpoints->every = 8;
  const TrainCallbacks callbacks;
  RunState kept;
  std::vector<std::vector<int64_t>> parts(2);
  for (const bool resumed : {false, true}) {
    run(test_devices(2), [&](Rank& rank) {
      SimulatedTime time(1e-3, rank.index() == 1 ? 24e-3 : 0);
      RankTrainer trainer(options, callbacks, task_of(options, data), rank, nullptr, nullptr, resumed ? &kept : nullptr,
                          {.every = resumed ? 1 : 100, .clock = [&] { return time.now(); }});
      trainer.epoch(1, [&] {
        RunState state = trainer.state();
        if (rank.index() == 0) kept = state;
      });
      parts[static_cast<size_t>(rank.index())] = time.parts();
    });
  }
  ASSERT_EQ(parts[0].size(), 4u);
  EXPECT_EQ(parts[0][0], 24);
  EXPECT_EQ(parts[0][1], 32);
  EXPECT_EQ(parts[1][1], 16);
}

TEST_F(BalancedTrainer, RefusesSharesThatAreNotOnePerPart) {
  const auto refused = [&](const std::string& balance, const Way& way = Averaged()) {
    TrainOptions settings = options(2, balance);
    settings.way = way;
    return error_of([&] { train(settings); });
  };
  EXPECT_THAT(refused("1,2,3"), Refused("balance"));
  EXPECT_THAT(refused("1,-2"), Refused("balance"));
  EXPECT_THAT(refused("2,1", SplitNetwork{{.mesh = {.pipeline = 2}, .microbatches = 2}}), Refused("balance"));
}

TEST(BalanceOption, IsKeptInTheConfiguration) {
  TrainOptions options;
  for (const char* balance : {"2,1", "0.1,1e-05,0", "auto", "equal"}) {
    options.batch.balance = balance_rule_from(balance);
    EXPECT_EQ(to_string(options.batch.balance), balance);
    EXPECT_THAT(to_json(options), HasSubstr("\"balance\": \"" + std::string(balance) + "\""));
    EXPECT_EQ(train_options_from_json(to_json(options)).batch.balance, options.batch.balance);
  }
}

}  // namespace balance_trainer_test
}  // namespace lockstep
