// Labels: concurrency
// evaluate() of criteria: means over samples, over what is counted, and over classes, whatever the split.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/data_parallel/evaluate_criteria.hpp>

#include "support/error_of.hpp"
#include "support/test_devices.hpp"

#include <vector>

namespace evaluate_criteria_test {

namespace F = torch::nn::functional;
using lockstep::Batch;
using lockstep::Criterion;
using lockstep::MeanOver;
using lockstep::Rank;
using lockstep::Refused;
using torch::Tensor;

constexpr int64_t kClasses = 4;

Tensor right(const Tensor& y_hat, const Tensor& y) {
  return y_hat.argmax(1) == y;
}

// Recall of each class. Class 3 never comes up.
Tensor right_by_class(const Tensor& y_hat, const Tensor& y) {
  return F::one_hot(y, kClasses).mul(right(y_hat, y).unsqueeze(1)).sum(0);
}
Tensor by_class(const Tensor& y) {
  return F::one_hot(y, kClasses).sum(0);
}

std::vector<Criterion> criteria() {
  const auto weighted = [](const Tensor& y_hat, const Batch& batch) {
    return (y_hat.square().sum(1) * batch["weight"]).sum();
  };
  return {F::cross_entropy, right, MeanOver(right_by_class, by_class),
          MeanOver(weighted, [](const Batch& batch) { return batch["weight"].sum(); })};
}

TEST(EvaluateCriteria, HasTheMeansOfOneDeviceWhateverTheSplit) {
  for (const int64_t size : {2, 7, 40}) {
    torch::manual_seed(size);
    const lockstep::Dataset data{torch::randn({size, 6}, torch::kDouble),
                                 torch::randint(kClasses - 1, {size}),
                                 {{"weight", torch::rand({size}, torch::kDouble)}}};
    const Tensor weights = torch::randn({6, kClasses}, torch::kDouble), y_hat = data.x.mm(weights);
    const Tensor counts = by_class(data.y), recalls = right_by_class(y_hat, data.y) / counts.to(torch::kDouble);
    const std::vector<double> expected{
        F::cross_entropy(y_hat, data.y).item<double>(), right(y_hat, data.y).to(torch::kDouble).mean().item<double>(),
        recalls.index({counts > 0}).mean().item<double>(),
        ((y_hat.square().sum(1) * data.more.at("weight")).sum() / data.more.at("weight").sum()).item<double>()};
    for (const int ranks : {1, 2, 3, 5}) {
      for (const int64_t grain : {0, 3}) {
        lockstep::run(lockstep::test_devices(ranks), [&](Rank& rank) {
          const auto forward = [&](const Batch& batch) { return batch.x.mm(weights.to(batch.x.device())); };
          EXPECT_THAT(evaluate(forward, data, criteria(), rank, 10, grain),
                      testing::Pointwise(testing::DoubleNear(1e-13), expected));
        });
      }
    }
  }
}

// One rank has four samples, whose halves could be compared, and the other three: the call would wait for ever.
TEST(EvaluateCriteria, LeavesWhatCallsOtherRanksAlone) {
  const lockstep::Dataset data{torch::ones({7, 2}), torch::zeros({7}, torch::kLong)};
  lockstep::run(lockstep::test_devices(2), [&](Rank& rank) {
    const auto of_all = [&rank](const Tensor& y_hat, const Tensor&) {
      const Tensor sum = y_hat.sum();
      rank.allreduce(sum);
      return sum / 14;
    };
    EXPECT_THAT(evaluate([](const Batch& batch) { return batch.x; }, data, {of_all}, rank), testing::ElementsAre(1));
  });
}

TEST(EvaluateCriteria, RefusesOtherShapesAndNoSamples) {
  const auto refused = [](const Criterion& criterion, int64_t size) {
    return lockstep::error_of([&] {
      lockstep::run(lockstep::test_devices(2), [&](Rank& rank) {
        const lockstep::Dataset data{torch::ones({size, 2}), torch::zeros({size}, torch::kLong)};
        std::ignore = evaluate([](const Batch& batch) { return batch.x; }, data, {criterion}, rank);
      });
    });
  };
  const auto all = [](const Tensor& y_hat, const Tensor&) { return y_hat; };
  const auto one = [](const Tensor& y) { return y.ne(7).sum(); };
  EXPECT_THAT(refused(all, 6), Refused("criteria"));
  EXPECT_THAT(refused(MeanOver(all, one), 6), Refused("criteria"));
  EXPECT_THAT(refused(MeanOver([](const Tensor& y_hat, const Tensor&) { return y_hat.sum(0); }, one), 6),
              Refused("criteria"));
  EXPECT_THAT(refused([](const Tensor& y_hat, const Tensor& y) { return y_hat.mean() / y.add(1).sum(); }, 9),
              Refused("criteria"));
  EXPECT_THAT(refused(MeanOver([](const Tensor&, const Batch& batch) { return torch::ones({batch.size()}); },
                               [](const Batch& batch) { return torch::ones({batch.size()}); }),
                      7),
              Refused("criteria"));
  EXPECT_THAT(refused(F::cross_entropy, 0), Refused());
}

}  // namespace evaluate_criteria_test
