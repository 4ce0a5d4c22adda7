// Calls that a user of a sharded net may take for the same as with one device: LibTorch's optimizers and clipping find
// no gradients there, so that they are refused; and so is what goes wrong on some ranks alone.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/data_parallel/convert_sync_batchnorm.hpp>
#include <lockstep/data_parallel/data_parallel.hpp>
#include <lockstep/data_parallel/optimizer.hpp>
#include <lockstep/optim/decay_groups.hpp>

#include "data_parallel/net_optimizer.hpp"
#include "data_parallel/replica.hpp"
#include "support/error_of.hpp"
#include "support/group_tests.hpp"
#include "support/hook_tests.hpp"
#include "support/test_devices.hpp"

#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

namespace sharded_misuse_test {

using lockstep::Batch;
using lockstep::convert_sync_batchnorm;
using lockstep::DataParallel;
using lockstep::DataParallelOptions;
using lockstep::decay_groups;
using lockstep::Error;
using lockstep::error_on_ranks;
using lockstep::Fails;
using lockstep::NetOptimizer;
using lockstep::Optimizer;
using lockstep::Rank;
using lockstep::Refused;
using lockstep::Sharded;
using testing::Each;
using testing::IsEmpty;
using torch::Tensor;
namespace F = torch::nn::functional;

using Net = DataParallel<torch::nn::SequentialImpl>;

const std::vector<Sharded> kStages = {Sharded::state, Sharded::gradients, Sharded::parameters};

torch::nn::Sequential two_layers() {
  return torch::nn::Sequential(torch::nn::Linear(4, 5), torch::nn::Linear(5, 2));
}

Batch a_batch() {  // a half, on each of two ranks
  return {torch::rand({2, 4}), torch::zeros({2}, torch::kLong), 4};
}

struct Outcome {
  std::vector<lockstep::Caught> errors = std::vector<lockstep::Caught>(2);
  std::vector<std::string> warnings = {};
};

Outcome outcome_of(const std::function<void(Rank&)>& body) {
  Outcome outcome;
  lockstep::run(
      lockstep::test_devices(2),
      [&](Rank& rank) { outcome.errors[static_cast<size_t>(rank.index())] = lockstep::error_of([&] { body(rank); }); },
      {.on_warning = [&](const std::string& text) { outcome.warnings.push_back(text); }});
  return outcome;
}

// Gives what a net refuses.
std::vector<lockstep::Caught> errors_of(const DataParallelOptions& options, const std::function<void(Net&)>& use) {
  return outcome_of([&](Rank& rank) {
           Net net(two_layers(), rank, options);
           use(net);
         })
      .errors;
}

TEST(ShardedMisuse, WhatLibTorchDoesWithTheNetsParametersIsRefused) {
  const std::vector<std::function<void(Net&)>> uses = {
      [](Net& net) { torch::optim::SGD(net->parameters(), 0.1); },
      [](Net& net) {
        const Optimizer sgd(net, torch::optim::SGDOptions(0.1));
        net.loss(a_batch(), F::cross_entropy).backward();
        torch::nn::utils::clip_grad_norm_(net->parameters(), 1);
      },
      [](Net& net) { (*net).zero_grad(); },
      [](Net& net) {
        { const auto whole = net.whole(); }
        net->eval();
      },
  };
  for (const Sharded sharded : kStages) {
    for (size_t use = 0; use < uses.size(); ++use) {
      EXPECT_THAT(errors_of({.sharded = sharded}, uses[use]), Each(Refused())) << use;
    }
  }
}

TEST(ShardedMisuse, AnOptimizerOfTheModulesOwnPointerIsRefusedAtTheFirstBackward) {
  for (const Sharded sharded : kStages) {
    const auto outcome = outcome_of([&](Rank& rank) {
      const auto module = two_layers();
      Net net(module, rank, {.sharded = sharded});
      torch::optim::SGD sgd(module->parameters(), 0.1);
      net.loss(a_batch(), F::cross_entropy).backward();
      ADD_FAILURE() << "a step that changes nothing";
    });
    EXPECT_THAT(outcome.errors, Each(Refused()));
  }
}

TEST(ShardedMisuse, ASecondStepWithoutABackwardIsRefused) {
  for (const Sharded sharded : kStages) {
    int steps = 0;
    const auto errors = errors_of({.sharded = sharded}, [&](Net& net) {
      Optimizer sgd(net, torch::optim::SGDOptions(0.1));
      net.loss(a_batch(), F::cross_entropy).backward();
      sgd.step();
      if (net.replica()->rank().index() == 0) ++steps;
      sgd.step();
    });
    EXPECT_EQ(steps, 1);
    EXPECT_THAT(errors, Each(Refused()));
  }
}

// In the first step, or later on in one of those in which ranks compare.
TEST(ShardedMisuse, OptionsThatDifferBetweenRanksAreRefused) {
  const std::vector<std::function<void(Optimizer&)>> changes = {
      [](Optimizer& adam) { adam.set_lr(0.5); },
      [](Optimizer& adam) {
        static_cast<torch::optim::AdamOptions&>(adam.param_groups()[0].options()).betas(std::make_tuple(0.5, 0.9));
      },
      [](Optimizer& adam) { lockstep::Optimizer::set_weight_decay(adam.param_groups()[0], 0.5); }};
  for (const Sharded sharded : {Sharded::nothing, Sharded::state, Sharded::gradients, Sharded::parameters}) {
    for (size_t change = 0; change < changes.size(); ++change) {
      for (const int first : {0, 2}) {
        if (first > 0 && sharded == Sharded::nothing) continue;  // there backward sees that the networks differ
        int steps = 0;
        const auto errors = errors_of({.sharded = sharded}, [&](Net& net) {
          Optimizer adam(net, torch::optim::AdamOptions(0.1));
          const int index = net.replica()->rank().index();
          for (int step = 0; step < 4; ++step) {
            if (step == first && index == 1) changes[change](adam);
            net.loss(a_batch(), F::cross_entropy).backward();
            adam.step();
            if (index == 0) ++steps;
          }
        });
        EXPECT_EQ(steps, first == 0 ? 0 : 3) << change;
        EXPECT_THAT(errors, Each(Fails(Error::difference))) << change;
      }
    }
  }
}

TEST(ShardedMisuse, OptionsThatDoNotGoTogetherAreRefused) {
  const auto hook = [] { return std::make_shared<lockstep::PlainHook>(); };
  for (const Sharded sharded : kStages) {
    EXPECT_THAT(errors_of({.average = false, .sharded = sharded}, [](Net&) {}), Each(Refused()));
    const auto hooked = outcome_of([&](Rank& rank) { Net(two_layers(), rank, {.hook = hook(), .sharded = sharded}); });
    EXPECT_THAT(hooked.errors, Each(Refused()));
  }
  for (const Sharded sharded : {Sharded::state, Sharded::gradients}) {
    EXPECT_THAT(errors_of({.sharded = sharded, .units = {"0"}}, [](Net&) {}), Each(Refused()));
  }
}

TEST(ShardedMisuse, NoGradientStaysInTheModule) {
  for (const Sharded sharded : kStages) {
    const auto outcome = outcome_of([&](Rank& rank) {
      const auto module = two_layers();
      Net net(module, rank, {.sharded = sharded});
      Optimizer sgd(net, torch::optim::SGDOptions(0.1));
      for (int step = 0; step < 2; ++step) {
        for (int part = 0; part < 2; ++part) {
          net.loss(a_batch(), F::cross_entropy).backward();
          for (const auto& parameter : module->parameters()) EXPECT_FALSE(parameter.grad().defined());
        }
        EXPECT_FALSE(sgd.gradients().empty());
        sgd.step();
        for (const auto& parameter : module->parameters()) EXPECT_FALSE(parameter.grad().defined());
      }
    });
    EXPECT_THAT(outcome.errors, Each("(no error)"));
  }
}

TEST(ShardedMisuse, WhatIsMeantIsLeftAlone) {
  for (const Sharded sharded : kStages) {
    for (const std::string what : {"zero_grad", "none", "accumulated", "look", "criterion", "whole"}) {
      const auto outcome = outcome_of([&](Rank& rank) {
        Net net(two_layers(), rank, {.sharded = sharded});
        Optimizer sgd(net, torch::optim::SGDOptions(0.1));
        const auto criterion = [&](const Tensor& y_hat, const Tensor& y) {
          const Tensor loss = F::cross_entropy(y_hat, y);
          return what == "criterion" ? loss + net->parameters()[0].square().mean() : loss;
        };
        for (int step = 0; step < 12; ++step) {
          if (what != "none") sgd.zero_grad();
          for (int part = 0; part < (what == "accumulated" ? 3 : 1); ++part) net.loss(a_batch(), criterion).backward();
          if (what == "look") {
            for (const auto& gradient : sgd.gradients()) gradient.mul_(0.5);
          }
          sgd.step();
          if (what != "whole") continue;
          const auto whole = net.whole();
          net.eval();
          EXPECT_EQ(net->parameters().size(), 4u);
          net.train();
        }
      });
      EXPECT_THAT(outcome.errors, Each("(no error)")) << what;
      EXPECT_THAT(outcome.warnings, IsEmpty()) << what;
    }
  }
}

Optimizer::Groups in_one_group(const torch::nn::Module& net) {
  return {torch::optim::OptimizerParamGroup(net.parameters())};
}

TEST(ShardedMisuse, GroupsThatLackAParameterOrHaveOneTwice) {
  using Groups = Optimizer::Groups;
  const auto error_with = [&](const std::function<Groups(const torch::nn::LinearImpl&)>& groups_of) {
    return error_on_ranks(2, [&](Rank& rank) {
      DataParallel net(torch::nn::Linear(2, 2), rank, {.sharded = Sharded::state});
      Optimizer(net, torch::optim::SGDOptions(0.1), [&](const torch::nn::Module& module) {
        return groups_of(dynamic_cast<const torch::nn::LinearImpl&>(module));
      });
    });
  };
  const auto group = [](const Tensor& parameter) {
    return torch::optim::OptimizerParamGroup(std::vector<Tensor>{parameter});
  };
  EXPECT_EQ(error_with([](auto& net) { return decay_groups(net); }), "(no error)");
  EXPECT_THAT(error_with([&](auto& net) { return Groups{group(net.weight)}; }), Refused("groups"));
  EXPECT_THAT(error_with([&](auto& net) {
                return Groups{group(net.weight), group(net.bias), group(net.weight)};
              }),
              Refused("groups"));
  EXPECT_THAT(error_with([&](auto& net) {
                const Tensor other = torch::ones({3}).requires_grad_();
                return Groups{group(net.weight), group(other)};
              }),
              Refused("groups"));
}

TEST(ShardedMisuse, WhatAnOptimizerCannotDo) {
  const auto make_sgd = [](const auto& groups) {
    return std::make_unique<torch::optim::SGD>(groups, torch::optim::SGDOptions(0.1));
  };
  const auto nothing = [](auto) { return std::unique_ptr<torch::optim::Optimizer>(); };
  const torch::optim::SGDOptions sgd(0.1);
  const DataParallelOptions sharded{.sharded = Sharded::state};
  const Batch batch{torch::ones({1, 2}), torch::zeros({1}, torch::kLong), 1};
  const auto error_with = [&](auto&& use) {
    return error_on_ranks(1, [&](Rank& rank) {
      const torch::nn::Linear module(2, 2);
      DataParallel net(module, rank, sharded);
      NetOptimizer optimizer(net.trained(), make_sgd, in_one_group, "Optimizer");
      use(net, optimizer);
    });
  };
  const auto error_with_buckets_of = [](int64_t bytes) {
    return error_on_ranks(1, [&](Rank& rank) {
      DataParallel(torch::nn::Linear(2, 2), rank, {.bucket_bytes = bytes, .sharded = Sharded::state});
    });
  };
  EXPECT_THAT(error_with_buckets_of(0), Refused());
  EXPECT_EQ(error_with_buckets_of(1), "(no error)");
  EXPECT_THAT(error_with([](auto&, auto& optimizer) { optimizer.step({}); }), Refused());
  EXPECT_THAT(error_on_ranks(1,
                             [&](Rank& rank) {
                               torch::nn::Linear linear(2, 2);
                               linear->bias.requires_grad_(false);
                               DataParallel net(linear, rank, sharded);
                               Optimizer optimizer(net, sgd);
                               linear->bias.requires_grad_(true);
                               net.loss(batch, F::cross_entropy).backward();
                               optimizer.step();
                             }),
              Refused());
  const auto error_of_sync_batchnorm_in = [](Sharded stage) {
    return error_on_ranks(1, [&](Rank& rank) {
      torch::nn::Sequential norm(torch::nn::BatchNorm1d(2));
      convert_sync_batchnorm(*norm, rank);
      DataParallel net(norm, rank, {.sharded = stage});
    });
  };
  EXPECT_THAT(error_of_sync_batchnorm_in(Sharded::gradients), Refused());
  EXPECT_EQ(error_of_sync_batchnorm_in(Sharded::state), "(no error)");
  EXPECT_EQ(error_with([&](auto& net, auto& optimizer) {
              net.loss(batch, F::cross_entropy).backward();
              optimizer.step({});
            }),
            "(no error)");
  EXPECT_THAT(error_with([&](auto& net, auto& optimizer) {
                const auto guard = net.no_sync();
                net.loss(batch, F::cross_entropy).backward();
                optimizer.step({});
              }),
              Refused());
  EXPECT_THAT(error_with([](auto&, auto& optimizer) {
                optimizer.load_state({{"step.other", torch::zeros({})}});
              }),
              Refused());
  EXPECT_THAT(error_on_ranks(1, [&](Rank& rank) { DataParallel(torch::nn::ReLU(), rank, sharded); }), Refused());
  EXPECT_THAT(error_on_ranks(1,
                             [&](Rank& rank) {
                               DataParallel net(torch::nn::Linear(2, 2), rank);
                               Optimizer(net, nothing);
                             }),
              Refused());
  EXPECT_THAT(error_on_ranks(1,
                             [&](Rank& rank) {
                               DataParallel net(torch::nn::Linear(2, 2), rank, sharded);
                               { Optimizer(net, sgd); }
                               net.backward_through([] {});
                             }),
              Refused());
  EXPECT_THAT(error_on_ranks(1,
                             [&](Rank& rank) {
                               DataParallel table(torch::nn::Embedding(torch::nn::EmbeddingOptions(4, 2).sparse(true)),
                                                  rank, sharded);
                               const Optimizer optimizer(table, sgd);
                               table.mean(table(torch::tensor({1})).sum(), 1, 1).backward();
                             }),
              Refused());
}

}  // namespace sharded_misuse_test
