// What a user of a ShardedOptimizer may take for the same as on one device: the optimizer of the slices has functions
// of the same names, and with stage 1 .grad holds whole gradients.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/data_parallel/data_parallel.hpp>
#include <lockstep/data_parallel/sharded_optimizer.hpp>

#include "support/error_of.hpp"
#include "support/test_devices.hpp"

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace sharded_misuse_test {

using lockstep::Batch;
using lockstep::DataParallel;
using lockstep::Rank;
using lockstep::ShardedOptimizer;
using testing::AllOf;
using testing::Each;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
namespace F = torch::nn::functional;

using Net = DataParallel<torch::nn::SequentialImpl>;

struct Outcome {
  std::vector<std::string> errors = std::vector<std::string>(2), warnings = {};
};

// Twelve steps with momentum SGD, each `step(net, optimizer)`.
Outcome steps_of(int stage, const std::function<void(Net&, ShardedOptimizer&, const Batch&)>& step) {
  Outcome outcome;
  lockstep::run(lockstep::test_devices(2),
                [&](Rank& rank) {
                  Net net(torch::nn::Sequential(torch::nn::Linear(4, 5), torch::nn::Linear(5, 2)), rank);
                  ShardedOptimizer optimizer(
                      net, [](auto slices) { return std::make_unique<torch::optim::SGD>(slices, 0.1); },
                      {.stage = stage});
                  const Batch batch{torch::rand({2, 4}), torch::zeros({2}, torch::kLong), 4};
                  outcome.errors[static_cast<size_t>(rank.index())] = lockstep::error_of([&] {
                    for (int i = 0; i < 12; ++i) step(net, optimizer, batch);
                  });
                },
                {.on_warning = [&](const std::string& text) { outcome.warnings.push_back(text); }});
  return outcome;
}

TEST(ShardedMisuse, TheSlicesZeroGradIsRefusedWhereGradientsWouldAddUp) {
  for (const int stage : {1, 2}) {
    const auto outcome = steps_of(stage, [](Net& net, ShardedOptimizer& optimizer, const Batch& batch) {
      optimizer.optimizer().zero_grad();
      net.loss(batch, F::cross_entropy).backward();
      optimizer.step();
    });
    EXPECT_THAT(outcome.errors,
                Each(HasSubstr(stage == 1 ? "optimizer().zero_grad() was called, which" : "(no error)")));
  }
}

TEST(ShardedMisuse, TheSlicesStepIsAWarning) {
  for (const int stage : {1, 2, 3}) {
    const auto outcome = steps_of(stage, [](Net& net, ShardedOptimizer& optimizer, const Batch& batch) {
      optimizer.zero_grad();
      net.loss(batch, F::cross_entropy).backward();
      optimizer.optimizer().step();
    });
    EXPECT_THAT(outcome.errors, Each("(no error)"));
    EXPECT_THAT(outcome.warnings,
                ElementsAre(AllOf(HasSubstr("step() was never called"), HasSubstr("step() of the ShardedOptimizer"))));
  }
}

TEST(ShardedMisuse, AnyWholeGradientThatIsChangedIsSeen) {
  const auto outcome = steps_of(1, [](Net& net, ShardedOptimizer& optimizer, const Batch& batch) {
    optimizer.zero_grad();
    net.loss(batch, F::cross_entropy).backward();
    net->parameters()[0].mutable_grad().mul_(0);
    optimizer.step();
  });
  EXPECT_THAT(outcome.errors, Each(HasSubstr(".grad was changed between backward() and step()")));
}

TEST(ShardedMisuse, WhatIsMeantIsLeftAlone) {
  for (const int stage : {1, 2, 3}) {
    for (const std::string what : {"zero_grad", "both", "the net's", "none", "accumulated", "look"}) {
      const auto outcome = steps_of(stage, [&](Net& net, ShardedOptimizer& optimizer, const Batch& batch) {
        if (what == "both") optimizer.optimizer().zero_grad();
        if (what != "none" && what != "the net's") optimizer.zero_grad();
        if (what == "the net's") net->zero_grad();
        const int parts = what == "accumulated" ? 3 : 1;
        for (int part = 0; part < parts; ++part) net.loss(batch, F::cross_entropy).backward();
        if (what == "look" && stage < 3) {
          for (const auto& parameter : net->parameters()) {
            if (parameter.grad().defined()) parameter.grad().abs().max().item();
          }
          for (const auto& gradient : optimizer.gradients()) gradient.mul_(0.5);
        }
        optimizer.step();
      });
      EXPECT_THAT(outcome.errors, Each("(no error)")) << stage << what;
      EXPECT_THAT(outcome.warnings, IsEmpty()) << stage << what;
    }
  }
}

}  // namespace sharded_misuse_test
