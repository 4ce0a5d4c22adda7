// Labels: concurrency
// The option `grain`: what it remarks, and an epoch's loss that does not depend on whose grains are whose.
#include <gmock/gmock.h>
#include <torch/torch.h>

#include "data/parts.hpp"
#include "support/error_of.hpp"
#include "support/small_training.hpp"
#include "support/test_devices.hpp"
#include "trainer/batch_settings.hpp"
#include "trainer/totals.hpp"

#include <cmath>
#include <string>
#include <utility>
#include <vector>

namespace lockstep {
namespace grain_test {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

TEST(Grain, RemarksOnRanksWithoutOne) {
  const BatchSettings batch{.size = 64, .grain = 24};  // three grains
  for (const int ranks : {1, 2, 3}) EXPECT_THAT(remark_on_idle_ranks(batch, ranks), IsEmpty());
  EXPECT_THAT(remark_on_idle_ranks(batch, 5),
              AllOf(HasSubstr("2 of the 5 ranks have nothing to do"), HasSubstr("64 samples has 3 grains of 24")));
  EXPECT_THAT(remark_on_idle_ranks({.size = 2}, 5), IsEmpty());
}

TEST(Grain, PartsOfABatchAreOfWholeGrains) {
  EXPECT_THAT(parts_of_full_batch({.size = 64, .grain = 24}, {}, 2), ElementsAre(48, 16));
  EXPECT_THAT(parts_of_full_batch({.size = 64, .grain = 24}, {1, 2}, 2), ElementsAre(24, 40));
  EXPECT_THAT(parts_of_full_batch({.size = 64, .grain = 24}, {}, 4), ElementsAre(24, 24, 16, 0));
  EXPECT_THAT(parts_of_full_batch({.size = 64}, {1, 3}, 2), ElementsAre(16, 48));
}

// Losses so different that their sum depends on the order of additions.
TEST(GrainLosses, HaveOneSumOnAnyNumberOfRanks) {
  constexpr int64_t steps = 5, grains = 7, samples = 3;
  torch::manual_seed(1);
  const torch::Tensor means = (8 * torch::randn({steps, grains})).exp();
  double expected = 0.25;
  for (int64_t step = 0; step < steps; ++step) {
    for (int64_t grain = 0; grain < grains; ++grain) {
      if (step != 2) expected += means[step][grain].item<double>() * samples;
    }
  }
  for (const int world : {1, 2, 3, 5, 8}) {
    for (const int64_t sum_after : {0, 3}) {
      run(test_devices(world), [&](Rank& rank) {
        GrainLosses losses(rank.device());
        losses.reset(0.25);
        for (int64_t step = 0; step < steps; ++step) {
          losses.begin_step(grains);
          const Range own = part_of(grains, rank.index(), world);
          for (int64_t grain = own.begin; grain < own.end; ++grain) losses.add(grain, means[step][grain], samples);
          if (step == 2) losses.drop_step();
          if (step == sum_after) losses.sum(rank);  // for a checkpoint
        }
        EXPECT_EQ(losses.sum(rank), expected);
        EXPECT_EQ(losses.sum(rank), expected);
        losses.reset();
        EXPECT_EQ(losses.sum(rank), 0);
      });
    }
  }
}

class GrainTraining : public SmallTraining {};

// Each part is one grain here, and the weights stay what they are. So only the epoch's sums can differ.
TEST_F(GrainTraining, AnEpochsLossDoesNotDependOnWhoseGrainsAreWhose) {
  const auto with = [&](int ranks, int parts, const std::string& name) {
    TrainOptions settings = options(ranks, name);
    settings.batch.grain = 8;
    settings.batch.accumulate = parts;
    settings.rate.lr = 1e-30;
    settings.epochs = 2;
    settings.keep.checkpoints = {.last = 100, .every = 2};
    return settings;
  };
  const TrainResult expected = train(with(1, 4, "one"));
  EXPECT_NE(expected.history[0].train_loss, expected.history[1].train_loss);  // the order of additions shows
  expect_same(train(with(2, 2, "two")), expected);
  expect_same(train(with(4, 1, "four")), expected);
  expect_same(train(with(5, 1, "five")), expected);
  expect_same(go_on(with(7, 1, "four on seven"), checkpoint("four", "epoch-0001-step-000004")), expected);
  expect_same(go_on(with(4, 1, "five on four"), checkpoint("five", "epoch-0001-step-000002")), expected);
  expect_same(go_on(with(1, 4, "one on one"), checkpoint("one", "epoch-0000-step-000002")), expected);
}

TEST_F(GrainTraining, WarnsOnceOfRanksWithoutWork) {
  TrainOptions settings = options(3, "run");
  settings.batch.grain = 16;
  settings.epochs = 2;
  std::vector<std::string> warnings;
  TrainCallbacks callbacks;
  callbacks.on_warning = [&](const std::string& text) {
    if (text.find("nothing to do") != text.npos) warnings.push_back(text);
  };
  train(settings, callbacks);
  EXPECT_THAT(warnings, ElementsAre(HasSubstr("1 of the 3 ranks")));
}

TEST_F(GrainTraining, ARunGoesOnWithItsGrain) {
  TrainOptions settings = options(1, "run");
  settings.batch.grain = 16;
  settings.epochs = 1;
  train(settings);
  settings.epochs = 2;
  TrainOptions other = settings;
  other.batch.grain = 8;
  EXPECT_THAT(error_of([&] { go_on(other, settings.keep.run_dir); }), Refused("grain"));
  other.batch.grain.reset();
  EXPECT_THAT(error_of([&] { go_on(other, settings.keep.run_dir); }), Refused("grain"));
  EXPECT_EQ(go_on(settings, settings.keep.run_dir).history.size(), 2u);

  TrainOptions without = options(1, "without");
  without.epochs = 1;
  train(without);
  without.batch.grain = 16;
  EXPECT_THAT(error_of([&] { go_on(without, without.keep.run_dir); }), Refused("grain"));
}

TEST_F(GrainTraining, EvaluatesAKeptRunToTheSameBits) {
  TrainOptions settings = options(2, "run");
  settings.batch.grain = 7;
  settings.epochs = 1;
  const TrainResult trained = train(settings);
  std::vector<EvalResult> results;
  for (const int ranks : {1, 2, 3, 5}) {
    for (const int64_t batch_size : {5, 256}) {
      results.push_back(
          evaluate_run(settings.keep.run_dir, {.devices = test_devices(ranks), .batch_size = batch_size}));
      EXPECT_EQ(results.back().loss, results.front().loss);
      EXPECT_EQ(results.back().accuracy(), trained.history[0].test_accuracy);
      EXPECT_EQ(results.back().weights, trained.history[0].weights);
    }
  }
  EXPECT_THAT(error_of([&] { evaluate_run(settings.keep.run_dir, {.devices = {torch::kCPU}, .threads_per_rank = 2}); }),
              Refused("grain", "threads_per_rank"));
}

}  // namespace grain_test
}  // namespace lockstep
