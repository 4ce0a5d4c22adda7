// Labels: concurrency
// Loss: what DataParallel::loss() takes as a criterion, and what a Loss tells.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/data_parallel/data_parallel.hpp>
#include <lockstep/data_parallel/optimizer.hpp>

#include "data/parts.hpp"
#include "support/error_of.hpp"
#include "support/test_devices.hpp"

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace loss_test {

using lockstep::Batch;
using lockstep::DataParallel;
using lockstep::error_of;
using lockstep::Rank;
using lockstep::Refused;
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

TEST(LossTest, TakesAnyCriterion) {
  const Batch whole{torch::randn({5, 6}), torch::randn({5, 3}), 5};
  torch::nn::Linear single(6, 3);
  F::mse_loss(single(whole.x), whole.y).backward();
  lockstep::run(lockstep::test_devices(2), [&](Rank& rank) {
    DataParallel net(torch::nn::Linear(6, 3), rank);
    {
      const torch::NoGradGuard no_grad;
      net->weight.copy_(single->weight), net->bias.copy_(single->bias);
    }
    const Batch part = part_of_batch(whole, rank);
    const auto expect_gradient = [&](lockstep::Loss loss) {
      net->zero_grad();
      loss.backward();
      EXPECT_TRUE(torch::allclose(net->weight.grad(), single->weight.grad(), 1e-5, 1e-6));
    };
    expect_gradient(net.loss(part, F::mse_loss));
    expect_gradient(
        net.loss(part, [](const torch::Tensor& y_hat, const torch::Tensor& y) { return (y_hat - y).square().mean(); }));
    expect_gradient(net.mean((net(part.x) - part.y).square().mean(), part.size(), part.global_size));
  });
}

TEST(LossTest, BadLossesAreRefused) {
  lockstep::run(lockstep::test_devices(2), [](Rank& rank) {
    DataParallel net(torch::nn::Linear(2, 3), rank);
    const torch::Tensor y = net(torch::ones({4, 2}));
    EXPECT_THAT(error_of([&] { std::ignore = net.mean(y, 4, 8); }), Refused());
    EXPECT_THAT(error_of([&] { std::ignore = net.mean(y.sum(), 9, 8); }), Refused());
    EXPECT_THAT(error_of([&] { std::ignore = net.mean(y.sum(), 0, 0); }), Refused());
    EXPECT_THAT(error_of([&] { std::ignore = net.mean({}, 1, 8); }), Refused());
  });
  EXPECT_THAT(error_of([] {
                lockstep::run(lockstep::test_devices(2), [](Rank& rank) {
                  DataParallel net(torch::nn::Embedding(torch::nn::EmbeddingOptions(5, 2).sparse(true)), rank);
                  net.mean(net(torch::tensor({1, 2})).mean(), 2, 4).backward();
                });
              }),
              Refused());
}

// ---- Targets that the loss leaves out.

struct LeftOut : testing::Test {
  LeftOut() {
    torch::manual_seed(5);
    net->to(torch::kDouble);
    y.index_put_({torch::tensor({0, 2, 3})}, -100);  // unequally many of each rank's
    F::cross_entropy(net(x), y).backward();
  }

  // Gives what this way to compute the loss says, or "(no error)" where its gradient is that of one device.
  lockstep::Caught outcome(
      int ranks, int64_t grain,
      const std::function<lockstep::Loss(DataParallel<torch::nn::LinearImpl>&, Batch&, Rank&)>& loss) {
    return error_of([&] {
      lockstep::run(lockstep::test_devices(static_cast<size_t>(ranks)), [&](Rank& rank) {
        DataParallel replica(std::dynamic_pointer_cast<torch::nn::LinearImpl>(net->clone()), rank);
        replica->zero_grad();
        for (auto& batch : lockstep::batches({x, y}, {.size = 10, .shuffle = false, .grain = grain}, rank)) {
          loss(replica, batch, rank).backward();
        }
        const auto near = torch::allclose(lockstep::on_host(replica->weight.grad()), net->weight.grad(), 1e-12, 1e-14);
        EXPECT_TRUE(near) << ranks << " ranks, grain " << grain;
      });
    });
  }

  torch::nn::Linear net{4, 3};
  torch::Tensor x = torch::randn({10, 4}, torch::kDouble), y = torch::arange(10) % 3;
};

TEST_F(LeftOut, AMeanOverTheOthersIsRefusedUnlessOneRankHasTheWholeBatch) {
  const auto by_name = [](auto& net, auto& batch, Rank&) { return net.loss(batch, F::cross_entropy); };
  const auto by_module = [](auto& net, auto& batch, Rank&) { return net.loss(batch, torch::nn::CrossEntropyLoss()); };
  const auto with_options = [](auto& net, auto& batch, Rank&) {
    return net.loss(batch, F::cross_entropy, F::CrossEntropyFuncOptions().ignore_index(-100));
  };
  const auto by_function = [](auto& net, auto& batch, Rank&) {
    return net.loss(batch, [&](const Batch& part) {
      const torch::Tensor y_hat = net(part.x);
      return F::cross_entropy(y_hat, part.y) + 0.1 * y_hat.square().mean();
    });
  };
  const auto by_mean = [](auto& net, auto& batch, Rank&) {
    return net.mean(F::cross_entropy(net(batch.x), batch.y), batch.size(), batch.global_size);
  };
  EXPECT_THAT(outcome(1, 0, by_name), Refused("criterion"));  // so that it is seen before there are more ranks
  EXPECT_EQ(outcome(1, 0, by_mean), "(no error)");
  for (const int ranks : {2, 3}) {
    EXPECT_THAT(outcome(ranks, 0, by_name), Refused());
    EXPECT_EQ(outcome(ranks, 0, by_module), "(no error)");  // their options say what counts
    EXPECT_EQ(outcome(ranks, 0, with_options), "(no error)");
    EXPECT_THAT(outcome(ranks, 0, by_function), Refused());
    EXPECT_THAT(outcome(ranks, 0, by_mean), Refused());
  }
  for (const int ranks : {1, 2, 3}) {
    EXPECT_THAT(outcome(ranks, 2, by_name), Refused());
    EXPECT_THAT(outcome(ranks, 2, by_function), Refused());
  }
}

// Each sample leaves out as many, so the average of the parts' means is the whole batch's.
TEST_F(LeftOut, EquallyManyOfEachSampleAreNoError) {
  y.fill_(1);
  torch::Tensor pairs = torch::stack({y, torch::full_like(y, -100)}, 1);
  lockstep::run(lockstep::test_devices(2), [&](Rank& rank) {
    DataParallel replica(std::dynamic_pointer_cast<torch::nn::LinearImpl>(net->clone()), rank);
    for (auto& batch : lockstep::batches({x, pairs}, {.size = 10, .shuffle = false}, rank)) {
      replica
          .loss(batch,
                [&](const Batch& part) {
                  const torch::Tensor y_hat = replica(part.x);
                  return F::cross_entropy(torch::stack({y_hat, y_hat}, 2), part.y);
                })
          .backward();
    }
  });
}

// The ways that the refusal tells of.
TEST_F(LeftOut, CountedByHandTheyTrainAsOnOneDevice) {
  const auto counted = [](const torch::Tensor& y) { return y.ne(-100).sum().item<int64_t>(); };
  const auto by_count = [&](auto& net, auto& batch, Rank& rank) {
    const int64_t here = counted(batch.y);
    const torch::Tensor all = torch::full({}, here, torch::TensorOptions(rank.device()).dtype(torch::kLong));
    rank.allreduce(all);
    return net.mean(F::cross_entropy(net(batch.x), batch.y), here, all.item<int64_t>());
  };
  const auto divided = [&](auto& net, auto& batch, Rank&) {
    const double share = static_cast<double>(counted(y)) / 10;  // share of the whole batch's targets
    return net.loss(batch, [&net, share](const Batch& part) {
      const auto sum = F::CrossEntropyFuncOptions().reduction(torch::kSum);
      return F::cross_entropy(net(part.x), part.y, sum) / (share * static_cast<double>(part.size()));
    });
  };
  for (const int ranks : {1, 2, 3}) {
    EXPECT_EQ(outcome(ranks, 0, by_count), "(no error)");
    EXPECT_EQ(outcome(ranks, 0, divided), "(no error)");
    EXPECT_EQ(outcome(ranks, 2, divided), "(no error)");
  }
}

TEST(CriterionOptions, WhatIsNoMeanOverTheSamplesIsRefused) {
  using lockstep::Criterion;
  const auto refused = [](const auto& options) { return error_of([&] { Criterion(F::cross_entropy, options); }); };
  EXPECT_THAT(refused(F::CrossEntropyFuncOptions().reduction(torch::kSum)), Refused());
  EXPECT_THAT(refused(F::CrossEntropyFuncOptions().reduction(torch::kNone)), Refused());
  EXPECT_THAT(error_of([] { Criterion{torch::nn::MSELoss{torch::nn::MSELossOptions{torch::kSum}}}; }), Refused());
  // These weights are of the values, and the mean divides by their number.
  Criterion(F::binary_cross_entropy_with_logits,
            F::BinaryCrossEntropyWithLogitsFuncOptions().weight(torch::ones({3})).pos_weight(torch::ones({3})));
  Criterion(F::kl_div, F::KLDivFuncOptions().reduction(torch::kBatchMean));
  Criterion(F::mse_loss, F::MSELossFuncOptions().reduction(torch::kMean));
}

}  // namespace loss_test
