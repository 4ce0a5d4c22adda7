// Labels: concurrency
// evaluate(): every sample once, whatever the split.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/ranks/evaluate.hpp>

namespace evaluate_test {

using lockstep::Rank;
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
        lockstep::run(lockstep::Devices(world, torch::kCPU), [&](Rank& rank) {
          const Score score =
              evaluate([&](const torch::Tensor& x) { return x.mm(weights); }, dataset, rank, batch_size);
          EXPECT_EQ(score.correct, correct);
          EXPECT_EQ(score.total, size);
          EXPECT_NEAR(score.loss, loss, 1e-5);
          EXPECT_DOUBLE_EQ(score.accuracy(), static_cast<double>(correct) / static_cast<double>(size));
        });
      }
    }
  }
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
