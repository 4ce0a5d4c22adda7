// Labels: concurrency
// Pipeline: how long ranks wait, and the memory that schedules need.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <lockstep/pipeline/pipeline.hpp>

#include "devices/memory_meter.hpp"
#include "support/small_nets.hpp"
#include "support/test_devices.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <string>
#include <thread>
#include <vector>

namespace pipeline_cost_test {

using lockstep::Batch;
using lockstep::copy_of;
using lockstep::Lambda;
using lockstep::Pipeline;
using lockstep::PipelineOptions;
using lockstep::PipelineSchedule;
using lockstep::Rank;
using lockstep::split_into_stages;
using torch::Tensor;
using torch::nn::Sequential;
namespace F = torch::nn::functional;
namespace nn = torch::nn;

// On sleeping layers, whose time does not depend on what else the machine does.
TEST(PipelineCostTest, TheIdleShareIsMeasured) {
  const auto sleep = [](const Tensor& x) {
    std::this_thread::sleep_for(std::chrono::milliseconds(80));
    return x;
  };
  const Batch batch{torch::randn({8, 2}), torch::randint(2, {8}), 8};
  for (const int microbatches : {1, 4}) {
    lockstep::run(lockstep::test_devices(2), [&](Rank& rank) {
      const Sequential net(Lambda{sleep}, nn::Linear(2, 2), Lambda{sleep});
      Pipeline pipeline(split_into_stages(net, {2}), rank,
                        {.schedule = PipelineSchedule::gpipe, .microbatches = microbatches});
      const double formula = lockstep::ideal_idle_share(PipelineSchedule::gpipe, 2, 1, microbatches);
      std::vector<double> differences;  // of several batches: a rank may be woken late
      for (int i = 0; i < 4; ++i) {
        pipeline.forward_backward(batch, F::cross_entropy);
        const auto stats = pipeline.stats();
        EXPECT_GE(stats.computing, 0.08 * microbatches);
        EXPECT_GE(stats.seconds, 0.08 * (microbatches + 1) - 0.02);  // it may begin later than the other rank
        differences.push_back(std::abs(stats.idle_share() - formula));
      }
      std::sort(differences.begin(), differences.end());
      EXPECT_LT(differences[1], 0.12);
    });
  }
}

// The most bytes of tensors that each rank needs in a batch, over what it has before.
std::vector<int64_t> peaks(const Sequential& net, int ranks, const PipelineOptions& options) {
  std::vector<int64_t> result(ranks);
  const Batch batch{torch::randn({2048, 64}), torch::randint(64, {2048}), 2048};
  lockstep::run(lockstep::test_devices(ranks), [&](Rank& rank) {
    Pipeline pipeline(split_into_stages(copy_of(net), ranks), rank, options);
    pipeline.forward_backward(batch, F::cross_entropy);  // gradients are there
    lockstep::MemoryMeter meter;
    pipeline.forward_backward(batch, F::cross_entropy);
    result[rank.index()] = meter.peak();
  });
  return result;
}

TEST(PipelineCostTest, OneForwardOneBackwardNeedsLessMemoryThanGPipe) {
  Sequential net;
  // So many layers that messages which are not delivered yet, on a busy machine up to all of them, weigh little.
  for (int i = 0; i < 32; ++i) net->push_back(nn::Linear(64, 64)), net->push_back(nn::Tanh());
  for (const int ranks : {2, 4}) {
    const auto gpipe = peaks(net, ranks, {.schedule = PipelineSchedule::gpipe, .microbatches = 16});
    const auto one_f_one_b = peaks(net, ranks, {.schedule = PipelineSchedule::one_f_one_b, .microbatches = 16});
    const auto again = peaks(net, ranks, {.schedule = PipelineSchedule::gpipe, .microbatches = 16, .recompute = true});
    for (int rank = 0; rank < ranks; ++rank) {
      RecordProperty(
          "bytes_" + std::to_string(ranks) + "_ranks_" + std::to_string(rank),
          std::to_string(gpipe[rank]) + " " + std::to_string(one_f_one_b[rank]) + " " + std::to_string(again[rank]));
      // With 16 microbatches rank r keeps ranks - r of them, beside what one step needs anyway.
      EXPECT_LT(one_f_one_b[rank], gpipe[rank] / 2) << ranks << " ranks, rank " << rank;
      EXPECT_LT(again[rank], gpipe[rank] / 2) << ranks << " ranks, rank " << rank;
    }
  }
}

}  // namespace pipeline_cost_test
