// Labels: concurrency arithmetic
// A loss of 16 bits cannot hold the weight of each part of a batch. The gradients are right all the same.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/data_parallel/data_parallel.hpp>
#include <lockstep/data_parallel/optimizer.hpp>

#include "support/test_devices.hpp"
#include "support/unit_gradient.hpp"

#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace low_precision_loss_test {

using lockstep::Batch;
using lockstep::DataParallel;
using lockstep::mean_in;
using lockstep::Rank;
using lockstep::UnitGradient;
using testing::Each;
using torch::Tensor;

struct Case {
  std::string name;
  int64_t samples = 3;
  int ranks = 2;
  int parts = 1;
  int64_t grain = 0;
};

class LowPrecisionLoss : public testing::TestWithParam<Case> {};

TEST_P(LowPrecisionLoss, HasTheGradientsOfAnyOther) {
  const Case& of = GetParam();
  for (const auto type : {torch::kDouble, torch::kBFloat16, torch::kHalf}) {
    std::vector<double> gradients(static_cast<size_t>(of.ranks));
    lockstep::run(lockstep::test_devices(of.ranks), [&](Rank& rank) {
      DataParallel net(std::make_shared<UnitGradient>(), rank);
      const lockstep::BatchOptions options{.size = of.samples, .grain = of.grain};
      for (auto& batch : lockstep::batches(lockstep::ones_of(of.samples), options, rank)) {
        const auto parts = batch.in_parts(of.parts);
        for (size_t i = 0; i < parts.size(); ++i) {
          std::optional<lockstep::NoSync> not_yet;
          if (i + 1 < parts.size()) not_yet.emplace(net.replica());
          net.loss(parts[i], mean_in(type)).backward();
        }
      }
      gradients[static_cast<size_t>(rank.index())] = net->w.grad().item<double>();
    });
    EXPECT_THAT(gradients, Each(testing::DoubleNear(1, 1e-14))) << type;
  }
}

INSTANTIATE_TEST_SUITE_P(Batches, LowPrecisionLoss,
                         testing::Values(Case{"UnevenParts"}, Case{"TwoPartsOfOneRank", 3, 1, 2},
                                         Case{"OddlyMany", 257}, Case{"OneLargeGrain", 257, 1, 1, 257},
                                         Case{"AGrainAboveFloat16", 70000, 1, 1, 70000},
                                         Case{"UnevenGrains", 600, 2, 1, 257}),
                         [](const auto& info) { return info.param.name; });

// Adds what it computes again to the gradients: within backward(), or as what torch::autograd::grad() gives.
struct AgainInBackward : torch::autograd::Function<AgainInBackward> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x, const Tensor& w, bool by_grad) {
    context->saved_data["by_grad"] = by_grad;
    context->save_for_backward({x, w});
    return x * w;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    const torch::AutoGradMode with_grad(true);
    const Tensor again = saved[0].detach() * saved[1];
    if (context->saved_data["by_grad"].toBool()) {
      return {{}, torch::autograd::grad({again}, {saved[1]}, {gradients[0]})[0], {}};
    }
    again.backward(gradients[0]);
    return {{}, {}, {}};
  }
};

TEST(LowPrecisionLoss, IsRightWhereBackwardComputesAgain) {
  for (const bool by_grad : {false, true}) {
    lockstep::run(lockstep::test_devices(2), [&](Rank& rank) {
      DataParallel net(std::make_shared<UnitGradient>(), rank, {.overlap = false});
      for (auto& batch : lockstep::batches(lockstep::ones_of(3), {.size = 3}, rank)) {
        net.loss(batch,
                 [&](const Batch& part) {
                   return AgainInBackward::apply(part.x, net->w, by_grad).mean().to(torch::kBFloat16);
                 })
            .backward();
      }
      EXPECT_NEAR(net->w.grad().item<double>(), 1, 1e-14) << by_grad;
    });
  }
}

// An input's gradient is weighed too: it is this rank's share of the batch's gradient, times the number of ranks.
TEST(LowPrecisionLoss, WeighsAnInputsGradient) {
  lockstep::run(lockstep::test_devices(2), [](Rank& rank) {
    const auto module = std::make_shared<UnitGradient>();
    module->w.mutable_data_ptr<double>()[0] = 1;
    DataParallel net(module, rank);
    for (auto& batch : lockstep::batches(lockstep::ones_of(3), {.size = 3}, rank)) {
      const Tensor x = batch.x.detach().requires_grad_();
      net.mean(net(x).mean().to(torch::kBFloat16), batch.size(), batch.global_size).backward();
      EXPECT_NEAR(x.grad()[0].item<double>(), 2. / 3, 1e-14);
    }
  });
}

TEST(LowPrecisionLoss, IsRightWithDividedParameters) {
  for (const int stage : {1, 2, 3}) {
    lockstep::run(lockstep::test_devices(2), [&](Rank& rank) {
      DataParallel net(std::make_shared<UnitGradient>(), rank, {.sharded = static_cast<lockstep::Sharded>(stage)});
      lockstep::Optimizer sgd(net, torch::optim::SGDOptions(1));
      for (auto& batch : lockstep::batches(lockstep::ones_of(3), {.size = 3}, rank)) {
        net.loss(batch, mean_in(torch::kBFloat16)).backward();
        sgd.step();
      }
      const torch::NoGradGuard no_grad;
      EXPECT_NEAR(net(torch::ones({1, 1}, torch::TensorOptions(rank.device()).dtype(torch::kDouble))).item<double>(),
                  -1, 1e-14)
          << stage;
    });
  }
}

}  // namespace low_precision_loss_test
