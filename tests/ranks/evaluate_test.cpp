// Labels: concurrency
// evaluate(): every sample once, whatever the split.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/ranks/evaluate.hpp>

#include "support/error_of.hpp"
#include "support/test_devices.hpp"

#include <atomic>
#include <optional>
#include <string>

namespace evaluate_test {

using lockstep::Rank;
using lockstep::Refused;
using lockstep::Score;

TEST(Evaluate, CountsEverySampleOnceWhateverTheSplit) {
  for (const int64_t size : {1, 2, 7, 40}) {
    torch::manual_seed(size);
    const lockstep::Dataset dataset{torch::randn({size, 6}), torch::randint(4, {size})};
    const torch::Tensor weights = torch::randn({6, 4});
    const torch::Tensor logits = dataset.x.mm(weights);
    const auto correct = (logits.argmax(1) == dataset.y).sum().item<int64_t>();
    const double loss = torch::nn::functional::cross_entropy(logits, dataset.y).item<double>();
    for (const int world : {1, 2, 3, 5}) {
      for (const int64_t batch_size : {1, 3, 100}) {
        lockstep::run(lockstep::test_devices(world), [&](Rank& rank) {
          const Score score =
              evaluate([&](const torch::Tensor& x) { return x.mm(weights.to(x.device())); }, dataset, rank, batch_size);
          EXPECT_EQ(score.correct, correct);
          EXPECT_EQ(score.total, size);
          EXPECT_NEAR(score.loss, loss, 1e-5);
          EXPECT_DOUBLE_EQ(score.accuracy(), static_cast<double>(correct) / static_cast<double>(size));
        });
      }
    }
  }
}

TEST(Evaluate, WithAGrainGivesTheSameBitsWhateverTheSplit) {
  constexpr int64_t grain = 4;
  for (const int64_t size : {1, 7, 40, 43}) {
    torch::manual_seed(size);
    // Losses so different that their sum depends on the order of additions.
    const torch::Tensor sizes = torch::pow(10.0F, torch::arange((size + grain - 1) / grain) * 5 % 13).view({-1, 1});
    const torch::Tensor x = torch::randn({size, 6}) * sizes.repeat_interleave(grain, 0).narrow(0, 0, size);
    const torch::Tensor weights = torch::randn({6, 4});
    const torch::Tensor right = x.mm(weights).argmax(1);
    const lockstep::Dataset dataset{x, torch::where(torch::arange(size) % 2 == 0, (right + 1) % 4, right)};
    const double mean = torch::nn::functional::cross_entropy(dataset.x.mm(weights), dataset.y).item<double>();
    std::optional<double> expected;
    for (const int world : {1, 2, 3, 5}) {
      for (const int64_t batch_size : {1, 4, 10, 100}) {
        SCOPED_TRACE(std::to_string(size) + " samples, " + std::to_string(world) + " ranks, in batches of " +
                     std::to_string(batch_size));
        std::atomic<int64_t> grains = 0;
        Score of_rank_0;
        lockstep::run(lockstep::test_devices(world), [&](Rank& rank) {
          const auto forward = [&](const torch::Tensor& x) {
            ++grains;
            EXPECT_TRUE(x.size(0) == grain || x.size(0) == size % grain);
            return x.mm(weights.to(x.device()));
          };
          const Score score = evaluate(forward, dataset, rank, batch_size, grain);
          EXPECT_EQ(score.total, size);
          if (rank.index() == 0) of_rank_0 = score;
        });
        EXPECT_EQ(grains, (size + grain - 1) / grain);
        EXPECT_EQ(of_rank_0.correct, (dataset.x.mm(weights).argmax(1) == dataset.y).sum().item<int64_t>());
        EXPECT_NEAR(of_rank_0.loss, mean, 1e-5 * (1 + mean));
        if (!expected) expected = of_rank_0.loss;
        EXPECT_EQ(of_rank_0.loss, *expected);
      }
    }
  }
}

TEST(Evaluate, RefusesAGrainThatIsNone) {
  const lockstep::Dataset dataset{torch::randn({4, 3}), torch::zeros({4}, torch::kLong)};
  lockstep::run({torch::kCPU}, [&](Rank& rank) {
    const auto forward = [](const torch::Tensor& x) { return x; };
    EXPECT_THAT(lockstep::error_of([&] { evaluate(forward, dataset, rank, 2, -1); }), Refused());
    EXPECT_THAT(lockstep::error_of([&] { evaluate(forward, dataset, rank, 0, 2); }), Refused());
  });
}

TEST(Evaluate, RefusesDataWithoutSamples) {
  const lockstep::Dataset nothing{torch::zeros({0, 3}), torch::zeros({0}, torch::kLong)};
  lockstep::run({torch::kCPU}, [&](Rank& rank) {
    EXPECT_THAT(lockstep::error_of([&] { evaluate([](const torch::Tensor& x) { return x; }, nothing, rank); }),
                Refused());
  });
}

TEST(Evaluate, BuildsNoGraph) {
  const lockstep::Dataset dataset{torch::randn({4, 3}), torch::zeros({4}, torch::kLong)};
  const torch::Tensor weights = torch::randn({3, 2}).requires_grad_();
  lockstep::run({torch::kCPU}, [&](Rank& rank) {
    evaluate(
        [&](const torch::Tensor& x) {
          const torch::Tensor logits = x.mm(weights);
          EXPECT_FALSE(logits.requires_grad());
          return logits;
        },
        dataset, rank);
  });
}

}  // namespace evaluate_test
