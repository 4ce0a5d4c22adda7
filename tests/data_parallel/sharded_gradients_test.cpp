// Labels: concurrency
// When a sharded net's gradients are reduced, how much memory they take, and what happens if a rank fails.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/data_parallel/data_parallel.hpp>
#include <lockstep/data_parallel/optimizer.hpp>

#include "data_parallel/backwards.hpp"
#include "devices/memory_meter.hpp"
#include "support/group_tests.hpp"

#include <algorithm>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

namespace lockstep {
namespace sharded_gradients_test {

using testing::ElementsAre;
using torch::Tensor;
namespace F = torch::nn::functional;
namespace nn = torch::nn;

using ShardedGradientsWorlds = Worlds;
INSTANTIATE_TEST_SUITE_P(Sizes, ShardedGradientsWorlds, testing::Values(1, 2, 3, 4),
                         [](const auto& info) { return std::to_string(info.param) + "Ranks"; });

const torch::optim::SGDOptions kSgd(0.1);

// Eight layers whose gradients are far larger than all else that a step needs.
nn::Sequential eight_layers() {
  nn::Sequential layers;
  for (int i = 0; i < 8; ++i) layers->push_back(nn::Linear(nn::LinearOptions(128, 128).bias(false)));
  return layers;
}
constexpr int64_t kLayerBytes = 128 * 128 * 4;

// The most that a rank had of gradients, whole ones and slices, in the second of two steps.
int64_t most_gradient_bytes(Rank& rank, const DataParallelOptions& options) {
  MemoryMeter meter;
  auto layers = eight_layers();
  layers->to(rank.device());
  const int64_t of_net = meter.current();
  DataParallel net(layers, rank, options);
  Optimizer sgd(net, kSgd);
  const Batch batch{torch::ones({1, 128}), torch::zeros({1}, torch::kLong), rank.world_size()};
  for (int step = 0; step < 2; ++step) {
    meter.reset_peak();
    net.loss(batch, F::cross_entropy).backward();
    sgd.step();
  }
  return meter.peak() - of_net;  // the parameters have moved, and are as large as they were
}

TEST_P(ShardedGradientsWorlds, WithStage2ARankHasItsSliceOfTheGradientsAndTwoBuckets) {
  on_ranks([](Rank& rank) {
    const int64_t all = 8 * kLayerBytes, slices = all / rank.world_size();
    const int64_t rest = kLayerBytes / 2;  // activations
    EXPECT_GE(most_gradient_bytes(rank, {.bucket_bytes = kLayerBytes, .sharded = Sharded::state}), all + slices);
    const int64_t stage_2 = most_gradient_bytes(rank, {.bucket_bytes = kLayerBytes, .sharded = Sharded::gradients});
    EXPECT_GE(stage_2, slices + kLayerBytes);
    EXPECT_LE(stage_2, slices + 2 * kLayerBytes + kLayerBytes + rest);  // and the gradient that autograd has just made
  });
}

TEST_P(ShardedGradientsWorlds, WithStage2ARankKeepsOnlyItsSliceOfTheGradients) {
  on_ranks([](Rank& rank) {
    MemoryMeter meter;
    auto layers = eight_layers();
    layers->to(rank.device());
    const int64_t of_net = meter.current();
    DataParallel net(layers, rank, {.bucket_bytes = kLayerBytes, .sharded = Sharded::gradients});
    Optimizer sgd(net, kSgd);
    const Batch batch{torch::ones({1, 128}), torch::zeros({1}, torch::kLong), rank.world_size()};
    for (int step = 0; step < 2; ++step) {
      net.loss(batch, F::cross_entropy).backward();
      EXPECT_LE(meter.current() - of_net, 8 * kLayerBytes / rank.world_size() + kLayerBytes / 2);
      sgd.step();
    }
  });
}

// Each part's averages are added to the slice. Under NoSync a rank keeps the gradients whole meanwhile.
TEST_P(ShardedGradientsWorlds, WithStage2PartsOfAStepLeaveNoWholeGradients) {
  on_ranks([](Rank& rank) {
    auto layers = eight_layers();
    DataParallel net(layers, rank, {.bucket_bytes = kLayerBytes, .sharded = Sharded::gradients});
    Optimizer sgd(net, kSgd);
    const Batch part{torch::ones({1, 128}), torch::zeros({1}, torch::kLong), 3 * rank.world_size()};
    const auto whole_gradients = [&] {
      const auto parameters = layers->parameters();
      return std::count_if(parameters.begin(), parameters.end(), [](const auto& p) { return p.grad().defined(); });
    };
    {
      const PartOfStep more_to_come(net.replica());
      net.loss(part, F::cross_entropy).backward();
    }
    EXPECT_EQ(whole_gradients(), 0);
    {
      const auto more_to_come = net.no_sync();
      net.loss(part, F::cross_entropy).backward();
    }
    EXPECT_EQ(whole_gradients(), 8);
    net.loss(part, F::cross_entropy).backward();
    EXPECT_EQ(whole_gradients(), 0);
    sgd.step();
  });
}

TEST_P(ShardedGradientsWorlds, PartsOfAStepAddUpToTheBatch) {
  auto whole = eight_layers();
  whole->to(torch::kDouble);
  const auto start = std::dynamic_pointer_cast<nn::SequentialImpl>(whole->clone());
  const Tensor x = torch::randn({24, 128}, torch::kDouble), y = torch::randint(128, {24});
  torch::optim::AdamW adamw(whole->parameters(), 1e-3);
  for (int step = 0; step < 3; ++step) {
    adamw.zero_grad();
    F::cross_entropy(whole->forward(x), y).backward();
    adamw.step();
  }
  for (const auto sharded : {Sharded::gradients, Sharded::parameters}) {
    on_ranks([&](Rank& rank) {
      const auto copy = rank.in_turn([&] { return std::dynamic_pointer_cast<nn::SequentialImpl>(start->clone()); });
      DataParallel net(copy, rank, {.bucket_bytes = 2 * kLayerBytes, .sharded = sharded});
      Optimizer optimizer(net, torch::optim::AdamWOptions(1e-3));
      const Range own = part_of(24, rank.index(), rank.world_size());
      const Batch batch{x.slice(0, own.begin, own.end), y.slice(0, own.begin, own.end), 24};
      for (int step = 0; step < 3; ++step) {
        optimizer.zero_grad();
        const auto parts = batch.in_parts(3);
        for (size_t part = 0; part < parts.size(); ++part) {
          std::optional<PartOfStep> more_to_come;
          if (part + 1 < parts.size()) more_to_come.emplace(net.replica());
          net.loss(parts[part], F::cross_entropy).backward();
        }
        optimizer.step();
      }
      const auto all = net.whole();
      for (size_t i = 0; i < 8; ++i) {
        expect_near(net->parameters()[i].detach(), whole->parameters()[i].detach(), 1e-10, std::to_string(i));
      }
    });
  }
}

TEST(ShardedGradients, AStepOfAPartAloneIsRefused) {
  EXPECT_THAT(error_on_ranks(2,
                             [](Rank& rank) {
                               DataParallel net(eight_layers(), rank, {.sharded = Sharded::gradients});
                               Optimizer sgd(net, kSgd);
                               const PartOfStep part(net.replica());
                               const auto x = torch::ones({1, 128}), y = torch::zeros({1}, torch::kLong);
                               net.loss({x, y, 4}, F::cross_entropy).backward();
                               sgd.step();
                             }),
              Refused());
}

TEST(ShardedGradients, ReducesBucketsWhileBackwardComputesOthers) {
  for (const bool overlap : {true, false}) {
    run(test_devices(2), [&](Rank& rank) {
      const auto calls = std::make_shared<CountingBackend::Calls>();
      Rank counting = counted(rank, calls);
      const auto layers = eight_layers();
      DataParallel net(layers, counting,
                       {.bucket_bytes = 2 * kLayerBytes, .overlap = overlap, .sharded = Sharded::gradients});
      Optimizer sgd(net, kSgd);
      size_t before_last = 0;
      layers->parameters()[0].register_hook([&](const Tensor&) { before_last = calls->size(); });
      calls->clear();
      net.loss({torch::ones({1, 128}), torch::zeros({1}, torch::kLong), 2}, F::cross_entropy).backward();
      EXPECT_EQ(before_last, overlap ? 3 : 0);
      EXPECT_THAT(*calls, ElementsAre("reduce_scatter", "reduce_scatter", "reduce_scatter", "reduce_scatter",
                                      "allreduce",    // the report
                                      "broadcast"));  // the order of the buckets, once
      sgd.step();
      for (int step = 2; step <= 3; ++step) {  // in the second one the ranks compare their options
        calls->clear();
        net.loss({torch::ones({1, 128}), torch::zeros({1}, torch::kLong), 2}, F::cross_entropy).backward();
        EXPECT_EQ(calls->size(), 5);
        calls->clear();
        sgd.step();
      }
      EXPECT_THAT(*calls, ElementsAre("allgather", "allgather", "allgather", "allgather"));
    });
  }
}

// Registered in the order in which they are not used: the first bucket would wait for the last gradient.
TEST(ShardedGradients, LearnsInWhichOrderBucketsAreComplete) {
  struct Reversed : nn::Module {
    Reversed() {
      for (int i = 0; i < 4; ++i) layers.push_back(register_module("layer" + std::to_string(3 - i), nn::Linear(8, 8)));
    }
    Tensor forward(Tensor x) {
      for (size_t i = layers.size(); i-- > 0;) x = layers[i](x);
      return x;
    }
    std::vector<nn::Linear> layers;
  };
  run(test_devices(3), [&](Rank& rank) {
    const auto calls = std::make_shared<CountingBackend::Calls>();
    Rank counting = counted(rank, calls);
    const auto module = std::make_shared<Reversed>();
    DataParallel net(module, counting, {.bucket_bytes = 1, .sharded = Sharded::gradients});
    Optimizer sgd(net, kSgd);
    size_t before_last = 0;
    module->layers.back()->weight.register_hook([&](const Tensor&) { before_last = calls->size(); });
    for (int step = 0; step < 2; ++step) {
      calls->clear();
      // 2 samples of 3 ranks: rank 2 has no gradients.
      const int64_t size = rank.index() < 2 ? 1 : 0;
      net.loss({torch::ones({size, 8}), torch::zeros({size}, torch::kLong), 2}, F::cross_entropy).backward();
      sgd.step();
      if (size > 0) EXPECT_GE(before_last, step == 0 ? 0 : 6) << step;
      if (size > 0 && step == 0) EXPECT_LE(before_last, 1);
    }
  });
}

TEST(ShardedGradients, ARankThatFailsIsNamedAndNobodyWaits) {
  for (const auto sharded : {Sharded::state, Sharded::gradients}) {
    const auto error = error_on_ranks(3, [&](Rank& rank) {
      const auto layers = eight_layers();
      DataParallel net(layers, rank, {.bucket_bytes = kLayerBytes, .sharded = sharded});
      Optimizer optimizer(net, kSgd);
      for (int step = 0; step < 3; ++step) {
        if (rank.index() == 1 && step == 1) {
          layers->parameters()[3].register_hook([](const Tensor&) { throw std::runtime_error("no more memory"); });
        }
        net.loss({torch::ones({1, 128}), torch::zeros({1}, torch::kLong), 3}, F::cross_entropy).backward();
        optimizer.step();
      }
    });
    EXPECT_THAT(error, Fails(Error::user_code, {1}));
  }
}

TEST(ShardedGradients, AfterAFailedBackwardARankIsOutOfStep) {
  EXPECT_THAT(error_on_ranks(1,
                             [](Rank& rank) {
                               DataParallel net(nn::Linear(2, 2), rank, {.sharded = Sharded::gradients});
                               const Optimizer optimizer(net, kSgd);
                               const auto fails = [] { throw std::runtime_error("spilt"); };
                               EXPECT_THROW(net.backward_through(fails), std::runtime_error);
                               net.backward_through([] {});
                             }),
              Refused());
}

}  // namespace sharded_gradients_test
}  // namespace lockstep
