// Labels: concurrency
// What a rank of a net with divided parameters holds at a time, and so when its units are gathered and reduced.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/data_parallel/data_parallel.hpp>
#include <lockstep/data_parallel/optimizer.hpp>

#include "data_parallel/loss_part.hpp"
#include "data_parallel/sharded_parameters.hpp"
#include "devices/memory_meter.hpp"
#include "ranks/trained_parameters.hpp"
#include "support/group_tests.hpp"
#include "support/small_nets.hpp"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace lockstep {
namespace full_sharding_memory_test {

using testing::ElementsAre;
using torch::Tensor;
namespace F = torch::nn::functional;
namespace nn = torch::nn;
namespace optim = torch::optim;

constexpr int kLayers = 32;
constexpr int64_t kWidth = 128, kLayerBytes = kWidth * kWidth * 4;

nn::Sequential many_layers() {
  nn::Sequential layers;
  for (int i = 0; i < kLayers; ++i) layers->push_back(nn::Linear(nn::LinearOptions(kWidth, kWidth).bias(false)));
  return layers;
}

Batch batch_of_one(const Rank& rank) {
  return {torch::ones({1, kWidth}), torch::zeros({1}, torch::kLong), rank.world_size()};
}

// Parameters, gradients and AdamW's two moments: four numbers a parameter. By default a unit is two of these layers,
// and on three ranks or more one.
TEST(FullShardingMemory, ARankHasItsSliceOfEverythingAndAFewUnits) {
  for (const int ranks : {1, 2, 3, 4}) {
    run(test_devices(ranks), [](Rank& rank) {
      const int64_t of_unit = (rank.world_size() > 2 ? 1 : 2) * kLayerBytes, rest = kLayerBytes / 2;  // activations
      for (const bool overlap : {false, true}) {
        MemoryMeter meter;
        const auto layers = many_layers();
        DataParallel net(layers, rank, {.overlap = overlap, .sharded = Sharded::parameters});
        Optimizer adam(net, optim::AdamWOptions());
        const int64_t slices = (kLayers * kLayerBytes + rank.world_size() - 1) / rank.world_size();
        const int64_t slack = kLayers * 64 * 4;            // slices are whole lines
        EXPECT_LE(meter.current(), 2 * (slices + slack));  // parameters and gradients
        for (int step = 0; step < 3; ++step) {
          meter.reset_peak();
          net.loss(batch_of_one(rank), F::cross_entropy).backward();
          adam.step();
        }
        // The unit that computes, the next one, the gradients of one, and the gradient that autograd has just made.
        const int64_t units = (overlap ? 3 : 2) * of_unit + kLayerBytes;
        EXPECT_LE(meter.peak(), 4 * (slices + slack) + units + rest) << overlap;
        EXPECT_GE(meter.peak(), 4 * slices + units - of_unit) << overlap;
        EXPECT_LE(meter.current(), 4 * (slices + slack) + rest);
        for (const auto& parameter : layers->parameters()) EXPECT_EQ(parameter.storage().nbytes(), 0u);
        const auto whole = net.whole();
        for (const auto& parameter : layers->parameters()) EXPECT_GE(parameter.storage().nbytes(), parameter.nbytes());
      }
    });
  }
}

// Each rank has one grain, or four. With four there are also the sums of whole gradients: the first sum of two grains,
// and the third grain's gradient.
TEST(FullShardingMemory, WithAGrainARankHasSumsOfWholeGradientsWhereItHasSeveralGrains) {
  for (const int64_t grains_of_each : {1, 4}) {
    run(test_devices(2), [&](Rank& rank) {
      constexpr int64_t of_unit = 2 * kLayerBytes, whole = kLayers * kLayerBytes, rest = kLayerBytes;
      MemoryMeter meter;
      DataParallel net(many_layers(), rank, {.sharded = Sharded::parameters});
      Optimizer adam(net, optim::AdamWOptions());
      const int64_t grains = 2 * grains_of_each;
      const Dataset data{torch::ones({grains, kWidth}), torch::zeros({grains}, torch::kLong)};
      int64_t at_rest = 0;
      for (int step = 0; step < 2; ++step) {
        meter.reset_peak();
        for (const auto& batch : batches(data.to(rank.device()), {.size = grains, .grain = 1}, rank)) {
          const auto mean_of = [&](const Batch& grain) { return F::cross_entropy(net(grain.x), grain.y); };
          lockstep::late_loss_of(net.replica(), batch, mean_of).backward();
        }
        adam.step();
        at_rest = meter.current();
      }
      const int64_t slices = 4 * whole / 2 + kLayers * 64 * 4, sums = grains_of_each == 1 ? 0 : 2 * whole;
      // Parameters of two units, gradients of two, and the gradient that autograd has just made.
      EXPECT_LE(meter.peak(), slices + sums + 4 * of_unit + kLayerBytes + kLayerBytes / 4) << grains;
      EXPECT_GE(meter.peak(), slices + sums + of_unit) << grains;
      EXPECT_LE(at_rest, slices + rest) << grains;
    });
  }
}

// How many parameters each unit has.
std::vector<size_t> unit_sizes(const std::vector<int64_t>& widths, const DataParallelOptions& options = {},
                               int ranks = 1) {
  nn::Sequential layers;
  for (const int64_t width : widths) layers->push_back(nn::Linear(nn::LinearOptions(width, 256).bias(width != 256)));
  std::vector<size_t> sizes;
  run(test_devices(ranks), [&](Rank& rank) {
    if (rank.index() > 0) return;
    const TrainedParameters parameters(*layers);
    for (const auto& unit : units_of(parameters.all(), options, rank)) sizes.push_back(unit.size());
  });
  return sizes;
}

// A layer of width w has w + 1 KiB, one of 256 KiB has no bias.
TEST(FullShardingMemory, UnitsAreSmallBesideTheNetAndNotTooSmall) {
  const std::vector<int64_t> equal(32, 256);
  EXPECT_EQ(unit_sizes(equal), std::vector<size_t>(16, 2));
  EXPECT_EQ(unit_sizes(equal, {.bucket_bytes = 3 * 256 << 10}), std::vector<size_t>(16, 2));
  EXPECT_EQ(unit_sizes(equal, {.bucket_bytes = 300 << 10}), std::vector<size_t>(32, 1));
  EXPECT_EQ(unit_sizes(equal, {}, 2), std::vector<size_t>(16, 2));
  EXPECT_EQ(unit_sizes(equal, {}, 4), std::vector<size_t>(32, 1));          // small beside a rank's slice
  EXPECT_THAT(unit_sizes({20, 20, 20, 20, 20}), ElementsAre(8, 2));         // 64 KiB at least
  EXPECT_THAT(unit_sizes({256, 8, 256, 8, 8, 256}), ElementsAre(1, 3, 5));  // small ones go with what follows
  EXPECT_THAT(unit_sizes({20, 20, 20}, {.bucket_bytes = 1}), ElementsAre(2, 2, 2));
  EXPECT_THAT(unit_sizes({20, 20, 20, 20, 20}, {.units = {"1"}}), ElementsAre(2, 2, 6));
}

TEST(FullShardingMemory, GathersAheadAndReducesWhileBackwardComputes) {
  for (const bool overlap : {false, true}) {
    run(test_devices(2), [&](Rank& rank) {
      const auto calls = std::make_shared<CountingBackend::Calls>();
      Rank counting = counted(rank, calls);
      nn::Sequential layers;
      std::vector<size_t> gathered;  // when each layer begins, after its unit has been gathered
      for (int i = 0; i < 3; ++i) {
        layers->push_back(nn::Linear(4, 4));
        layers->push_back(Lambda([&](const Tensor& x) {
          gathered.push_back(calls->size());
          return x;
        }));
      }
      DataParallel net(layers, counting, {.bucket_bytes = 1, .overlap = overlap, .sharded = Sharded::parameters});
      Optimizer sgd(net, optim::SGDOptions(0.1));
      for (int step = 0; step < 3; ++step) {
        calls->clear();
        gathered.clear();
        const Tensor x = torch::ones({1, 4}).requires_grad_();
        net.loss({x, torch::zeros({1}, torch::kLong), 2}, F::cross_entropy).backward();
        if (step > 0 && overlap) EXPECT_THAT(gathered, ElementsAre(2, 3, 4));  // in step 0 it learns what follows
        if (!overlap) EXPECT_THAT(gathered, ElementsAre(1, 2, 3));
        EXPECT_EQ(std::count(calls->begin(), calls->end(), "allgather"), 3 + 2);  // backward finds the last unit there
        EXPECT_EQ(std::count(calls->begin(), calls->end(), "reduce_scatter"), 3);
        sgd.step();
      }
    });
  }
}

// Layers of 4, 4, 1 and 1 MiB, in slices of 5. At most 5 are whole or on their way: the largest, and a fifth of that.
TEST(FullShardingMemory, DoesNotGatherAheadWhatWouldTakeTooMuchMemory) {
  run(test_devices(2), [](Rank& rank) {
    const auto calls = std::make_shared<CountingBackend::Calls>();
    Rank counting = counted(rank, calls);
    nn::Sequential layers;
    std::vector<size_t> gathered;  // when each layer begins, after its unit has been gathered
    for (const auto& [in, out] : {std::pair{1024, 1024}, {1024, 1024}, {1024, 256}, {256, 1024}}) {
      layers->push_back(nn::Linear(nn::LinearOptions(in, out).bias(false)));
      layers->push_back(Lambda([&](const Tensor& x) {
        gathered.push_back(calls->size());
        return x;
      }));
    }
    DataParallel net(layers, counting, {.bucket_bytes = 1, .sharded = Sharded::parameters});
    Optimizer sgd(net, optim::SGDOptions(0.1));
    for (int step = 0; step < 3; ++step) {
      calls->clear();
      gathered.clear();
      const Tensor x = torch::ones({1, 1024}).requires_grad_();
      net.loss({x, torch::zeros({1}, torch::kLong), 2}, F::cross_entropy).backward();
      if (step > 0) EXPECT_THAT(gathered, ElementsAre(1, 3, 4, 5));
      sgd.step();
    }
  });
}

}  // namespace full_sharding_memory_test
}  // namespace lockstep
