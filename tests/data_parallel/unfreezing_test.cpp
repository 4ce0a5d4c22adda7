// Parameters that are frozen and unfrozen in any order, before and after the DataParallel is made: training is that of
// plain LibTorch on one device, or an Error.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/data/data.hpp>
#include <lockstep/data_parallel/data_parallel.hpp>
#include <lockstep/data_parallel/optimizer.hpp>

#include "support/error_of.hpp"
#include "support/group_tests.hpp"
#include "support/test_devices.hpp"

#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace unfreezing_test {

using namespace lockstep;
using testing::Each;
using testing::HasSubstr;
using testing::IsEmpty;
using torch::Tensor;
namespace F = torch::nn::functional;
namespace nn = torch::nn;

const Dataset data = [] {
  torch::manual_seed(1);
  return Dataset{torch::randn({14, 5}, torch::kDouble), torch::arange(14) % 3};
}();

// Three linear layers, whose numbers in the Sequential are 0, 2 and 4.
const nn::Sequential start = [] {
  torch::manual_seed(2);
  nn::Sequential net(nn::Linear(5, 8), nn::Tanh(), nn::Linear(8, 6), nn::Tanh(), nn::Linear(6, 3));
  net->to(torch::kDouble);
  return net;
}();

// A Plan says which of the layers 0, 2 and 4 need a gradient: first when the DataParallel is made, then in each epoch.
using Plan = std::vector<std::string>;

void train_only(nn::Module& net, const std::string& layers) {
  for (auto& item : net.named_parameters()) {
    item.value().requires_grad_(layers.find(item.key().substr(0, 1)) != std::string::npos);
  }
}

torch::optim::AdamWOptions settings() {
  return torch::optim::AdamWOptions(0.02).weight_decay(0.1);
}

BatchOptions of_epoch(size_t epoch, int64_t grain) {
  return {.size = 5, .epoch = static_cast<int64_t>(epoch), .grain = grain};
}

nn::Sequential trained_by_libtorch(const Plan& plan) {
  nn::Sequential net = copy_of(start);
  torch::optim::AdamW adam(net->parameters(), settings());
  for (size_t epoch = 1; epoch < plan.size(); ++epoch) {
    train_only(*net, plan[epoch]);
    for (auto& batch : batches(data, of_epoch(epoch, 0))) {
      adam.zero_grad();
      F::cross_entropy(net->forward(batch.x), batch.y).backward();
      adam.step();
    }
  }
  return net;
}

struct Way {
  Sharded sharded = Sharded::nothing;
  int64_t grain = 0;
  int64_t parts = 1;
};

nn::Sequential trained(const Plan& plan, const Way& way, Rank& rank) {
  nn::Sequential module = copy_of(start);
  train_only(*module, plan[0]);
  DataParallel net(module, rank, {.bucket_bytes = 200, .first_bucket_bytes = 100, .sharded = way.sharded});
  Optimizer adam(net, settings());
  for (size_t epoch = 1; epoch < plan.size(); ++epoch) {
    train_only(*module, plan[epoch]);
    for (auto& batch : batches(data, of_epoch(epoch, way.grain), rank)) {
      adam.zero_grad();
      auto parts = batch.in_parts(way.parts);
      for (size_t part = 0; part + 1 < parts.size(); ++part) {
        const auto later = net.no_sync();
        net.loss(parts[part], F::cross_entropy).backward();
      }
      net.loss(parts.back(), F::cross_entropy).backward();
      adam.step();
    }
  }
  const Whole whole = net.whole();
  return copy_of(module);
}

const std::vector<Plan> plans_from_all = {{"024", "4", "024"}, {"024", "024", "02", "4", "024"}};
const std::vector<Plan> plans_from_some = {
    {"4", "4", "24", "024"}, {"4", "024", "4", "024"}, {"04", "4", "02", "24", "0", "24"}, {"", "0", "024"}};

class Unfreezing : public Worlds {};
INSTANTIATE_TEST_SUITE_P(Sizes, Unfreezing, testing::Values(1, 2, 3),
                         [](const auto& info) { return std::to_string(info.param) + "Ranks"; });

void expect_as_by_libtorch(const Plan& plan, const Way& way, Rank& rank) {
  const std::string what = testing::PrintToString(plan) + ", way " + std::to_string(static_cast<int>(way.sharded)) +
                           " " + std::to_string(way.grain) + " " + std::to_string(way.parts);
  const auto expected = trained_by_libtorch(plan)->named_parameters();
  for (const auto& item : trained(plan, way, rank)->named_parameters()) {
    expect_near(item.value().detach(), expected[item.key()].detach(), 1e-12, what + ", " + item.key());
    expect_equal_on_all_ranks(item.value(), rank, what + ", " + item.key());
  }
}

TEST_P(Unfreezing, AfterTheDataParallelWasMadeIsExact) {
  on_ranks([](Rank& rank) {
    for (const auto& plan : plans_from_all) {
      for (const auto sharded : {Sharded::nothing, Sharded::state, Sharded::gradients, Sharded::parameters})
        expect_as_by_libtorch(plan, {.sharded = sharded}, rank);
    }
  });
}

TEST_P(Unfreezing, WhatWasFrozenWhenTheDataParallelWasMadeIsExact) {
  on_ranks([](Rank& rank) {
    for (const auto& plan : plans_from_some) {
      for (const Way& way : {Way{}, Way{.parts = 2}, Way{.grain = 2}, Way{.grain = 1, .parts = 2}})
        expect_as_by_libtorch(plan, way, rank);
    }
  });
}

TEST(UnfreezingByGrains, HasTheSameBitsOnAnyNumberOfRanks) {
  for (const auto& plan : plans_from_some) {
    std::vector<Tensor> expected;
    for (const int world : {1, 2, 3}) {
      run(test_devices(static_cast<size_t>(world)), [&](Rank& rank) {
        const auto parameters = trained(plan, {.grain = 2}, rank)->parameters();
        if (rank.index() > 0) return;
        if (world == 1) expected = parameters;
        for (size_t i = 0; i < parameters.size(); ++i) EXPECT_TRUE(parameters[i].equal(expected[i])) << world << i;
      });
    }
  }
}

TEST(UnfreezingWithoutAWarning, InAnyOrder) {
  std::vector<std::string> warnings;
  run(test_devices(2),
      [](Rank& rank) {
        for (const auto& plans : {plans_from_all, plans_from_some}) {
          for (const auto& plan : plans) trained(plan, {}, rank);
        }
        // The first loss of all leads to what was unfrozen.
        trained({"4", "024"}, {}, rank);
      },
      {.on_warning = [&](const std::string& text) { warnings.push_back(text); }});
  EXPECT_THAT(warnings, IsEmpty());
}

// Neither hangs: the ranks' calls differ, or their parameters do.
TEST(UnfreezingAlone, IsAnErrorOnAllRanks) {
  const auto errors_if = [](const std::string& first, const std::function<std::string(int)>& then, int64_t grain) {
    return errors_on_ranks(3, [&](Rank& rank) {
      trained({first, first, then(rank.index()), then(rank.index()), then(rank.index())}, {.grain = grain}, rank);
    });
  };
  for (const int64_t grain : {0, 2}) {
    for (const int alone : {0, 2}) {
      const auto one = [&](int rank) { return std::string(rank == alone ? "024" : "4"); };
      EXPECT_THAT(errors_if("4", one, grain), Each(Fails(Error::difference))) << alone << grain;
      EXPECT_THAT(errors_if("024", one, grain), Each(Fails(Error::difference))) << alone << grain;
    }
    EXPECT_THAT(errors_if(
                    "4", [](int rank) { return std::string(rank == 1 ? "04" : "24"); }, grain),
                Each(Fails(Error::difference)));
  }
}

TEST(UnfreezingTooLate, IsRefused) {
  for (const auto sharded : {Sharded::state, Sharded::gradients, Sharded::parameters}) {
    const auto errors = errors_on_ranks(2, [&](Rank& rank) { trained({"4", "4", "24"}, {.sharded = sharded}, rank); });
    EXPECT_THAT(errors, Each(Refused()));
    EXPECT_THAT(errors, Each(HasSubstr("and then freeze what is trained later")));
  }
  // Within a step by grains, of which a part is computed already.
  EXPECT_THAT(errors_on_ranks(2,
                              [](Rank& rank) {
                                nn::Sequential module = copy_of(start);
                                train_only(*module, "4");
                                DataParallel net(module, rank);
                                for (auto& batch : batches(data, {.size = 8, .grain = 2}, rank)) {
                                  const auto parts = batch.in_parts(2);
                                  {
                                    const auto later = net.no_sync();
                                    net.loss(parts[0], F::cross_entropy).backward();
                                  }
                                  train_only(*module, "24");
                                  net.loss(parts[1], F::cross_entropy).backward();
                                }
                              }),
              Each(Refused()));
}

}  // namespace unfreezing_test
