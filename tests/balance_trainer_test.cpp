// lockstep train's --balance: the results of equal parts, in other parts; and what it cannot be combined with.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/trainer.hpp>

#include "error_of.hpp"
#include "run_state.hpp"
#include "small_training.hpp"

#include <algorithm>
#include <functional>
#include <numeric>

namespace lockstep {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

class BalancedTrainer : public SmallTraining {
 protected:
  BalancedTrainer() : SmallTraining(460) {}

  // Two epochs of 28 full batches and a smaller one; nothing is kept.
  TrainOptions options(int ranks, const std::string& balance) const {
    TrainOptions options = SmallTraining::options(ranks, "");
    options.batch_size = 16;
    options.epochs = 2;
    options.balance = balance;
    return options;
  }
    options.run_dir.clear();

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
  split.split = {.mesh = {.data = 2, .pipeline = 2}, .microbatches = 2};
  const TrainResult result = train(split);
  expect_near(result, expected);
  EXPECT_THAT(result.history[0].parts, ElementsAre(12, 4));
}

TEST_F(BalancedTrainer, SoDoPartsThatFollowTheSpeed) {
  const TrainResult expected = train(options(1, "equal"));
  TrainOptions automatic = options(3, "auto");
  automatic.run_dir = runs_ / "run";
  automatic.accumulate = 2;
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
  first.run_dir = runs_ / "first";
  first.checkpoint_every = 5;
  first.keep_last = 100;
  train(first);
  const auto checkpoint = runs_ / "first" / "checkpoints" / "epoch-0000-step-000005.safetensors";
  const auto totals = tensors_under("ranks", read_run_state(checkpoint).tensors);
  const auto samples = std::find_if(totals.begin(), totals.end(), [](auto& entry) { return entry.first == "totals"; });
  ASSERT_NE(samples, totals.end());
  EXPECT_TRUE(samples->second.select(1, 2).equal(5 * torch::tensor({12.0, 4.0}, torch::kDouble)));
  for (const std::string balance : {"auto", "1,3", "equal"}) {
    SCOPED_TRACE(balance);
    TrainOptions second = options(2, balance);
    second.resume = checkpoint;
    expect_near(train(second), expected);
  }
}

TEST_F(BalancedTrainer, SaysWhatDoesNotGoTogether) {
  const auto refused = [&](const std::string& balance, auto change) {
    TrainOptions settings = options(2, balance);
    change(settings);
    return error_of([&] { train(settings); });
  };
  const auto nothing = [](auto&) {};
  EXPECT_THAT(refused("fast", nothing), AllOf(HasSubstr("\"fast\""), HasSubstr("equal, auto, or a share")));
  EXPECT_THAT(refused("", nothing), HasSubstr("the balance is \"\""));
  EXPECT_THAT(refused("1,", nothing), HasSubstr("the balance is \"1,\""));
  EXPECT_THAT(refused("1;2", nothing), HasSubstr("the balance is \"1;2\""));
  EXPECT_THAT(refused("1,2,3", nothing), AllOf(HasSubstr("--balance"), HasSubstr("3 shares for 2 parts")));
  EXPECT_THAT(refused("1,-2", nothing), HasSubstr("part 1 is -2"));
  EXPECT_THAT(refused("auto",
                      [](auto& o) {
                        o.model = "resnet18";
                        o.sync_batchnorm = true;
                      }),
              AllOf(HasSubstr("--balance auto"), HasSubstr("--sync-batchnorm"), HasSubstr("--balance 2,1")));
  EXPECT_THAT(refused("auto", [](auto& o) { o.zero_stage = 2; }), HasSubstr("--balance auto measures"));
  EXPECT_THAT(refused("auto", [](auto& o) { o.sync_every = 4; }), HasSubstr("--balance auto keeps short"));
  EXPECT_THAT(refused("auto", [](auto& o) { o.split = {.mesh = {.pipeline = 2}, .microbatches = 2}; }),
              AllOf(HasSubstr("--balance auto"), HasSubstr("2 microbatches")));
  EXPECT_THAT(refused("2,1", [](auto& o) { o.split = {.mesh = {.pipeline = 2}, .microbatches = 2}; }),
              HasSubstr("2 shares for 1 parts"));
}

TEST(BalanceOption, IsKeptInTheConfiguration) {
  TrainOptions options;
  options.balance = "2,1";
  EXPECT_EQ(train_options_from_json(to_json(options)).balance, "2,1");
}

}  // namespace
}  // namespace lockstep
