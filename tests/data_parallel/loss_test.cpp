// Labels: concurrency
// Loss: what DataParallel::loss() takes as a criterion, and what a Loss tells.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/data_parallel/data_parallel.hpp>

#include "support/error_of.hpp"
#include "support/test_devices.hpp"

#include <vector>

namespace loss_test {

using lockstep::Batch;
using lockstep::DataParallel;
using lockstep::error_of;
using lockstep::Rank;
using testing::AllOf;
using testing::HasSubstr;
namespace F = torch::nn::functional;

const int64_t samples = 7;

Batch part_of_batch(const Batch& whole, const Rank& rank) {
  const auto part = lockstep::part_of(whole.global_size, rank.index(), rank.world_size());
  return {whole.x.slice(0, part.begin, part.end).to(rank.device()),
          whole.y.slice(0, part.begin, part.end).to(rank.device()), whole.global_size};
}

struct Training : testing::Test {
  Training() { torch::manual_seed(3); }
  torch::nn::Linear net{4, 3};
  Batch whole{torch::randn({samples, 4}), torch::randint(3, {samples}), samples};
};

TEST_F(Training, ACriterionTakesOptions) {
  const auto options = F::CrossEntropyFuncOptions().label_smoothing(0.3);
  F::cross_entropy(net(whole.x), whole.y, options).backward();
  lockstep::run(lockstep::test_devices(3), [&](Rank& rank) {
    const auto replica = std::dynamic_pointer_cast<torch::nn::LinearImpl>(net->clone());
    DataParallel data_parallel(replica, rank);
    replica->zero_grad();
    data_parallel.loss(part_of_batch(whole, rank), F::cross_entropy, options).backward();
    EXPECT_TRUE(torch::allclose(lockstep::on_host(replica->weight.grad()), net->weight.grad(), 1e-5, 1e-6));
  });
}

TEST_F(Training, ACriterionMayBeAModule) {
  F::cross_entropy(net(whole.x), whole.y).backward();
  lockstep::run(lockstep::test_devices(3), [&](Rank& rank) {
    const auto replica = std::dynamic_pointer_cast<torch::nn::LinearImpl>(net->clone());
    DataParallel data_parallel(replica, rank);
    replica->zero_grad();
    data_parallel.loss(part_of_batch(whole, rank), torch::nn::CrossEntropyLoss()).backward();
    EXPECT_TRUE(torch::allclose(lockstep::on_host(replica->weight.grad()), net->weight.grad(), 1e-5, 1e-6));
  });
}

TEST_F(Training, ALossTellsTheWholeBatchsMean) {
  const double expected = F::cross_entropy(net(whole.x), whole.y).item<double>();
  for (const int ranks : {1, 3, 8}) {  // with eight, one part is empty
    lockstep::run(lockstep::test_devices(ranks), [&](Rank& rank) {
      DataParallel data_parallel(std::dynamic_pointer_cast<torch::nn::LinearImpl>(net->clone()), rank);
      auto loss = data_parallel.loss(part_of_batch(whole, rank), F::cross_entropy);
      EXPECT_NEAR(loss.global_item(), expected, 1e-6);
      loss.backward();
    });
  }
}

TEST(CriterionOptions, WhatIsNoMeanOverTheSamplesIsRefused) {
  using lockstep::Criterion;
  const auto refused = [](const auto& options) { return error_of([&] { Criterion(F::cross_entropy, options); }); };
  EXPECT_THAT(refused(F::CrossEntropyFuncOptions().reduction(torch::kSum)),
              AllOf(HasSubstr("the reduction kSum"), HasSubstr("`reduction`")));
  EXPECT_THAT(refused(F::CrossEntropyFuncOptions().reduction(torch::kNone)), HasSubstr("the reduction kNone"));
  EXPECT_THAT(refused(F::CrossEntropyFuncOptions().weight(torch::ones({3}))),
              AllOf(HasSubstr("weights of classes"), HasSubstr("net.loss(batch, function)")));
  EXPECT_THAT(error_of([] {
                Criterion(torch::nn::CrossEntropyLoss(torch::nn::CrossEntropyLossOptions().weight(torch::ones({3}))));
              }),
              HasSubstr("weights of classes"));
  EXPECT_THAT(error_of([] { Criterion{torch::nn::MSELoss{torch::nn::MSELossOptions{torch::kSum}}}; }),
              HasSubstr("the reduction kSum"));
  // These weights are of the values, and the mean divides by their number.
  Criterion(F::binary_cross_entropy_with_logits,
            F::BinaryCrossEntropyWithLogitsFuncOptions().weight(torch::ones({3})).pos_weight(torch::ones({3})));
  Criterion(F::kl_div, F::KLDivFuncOptions().reduction(torch::kBatchMean));
  Criterion(F::mse_loss, F::MSELossFuncOptions().reduction(torch::kMean));
}

}  // namespace loss_test
