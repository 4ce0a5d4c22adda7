// Labels: concurrency
// Pipeline: the memory that schedules need.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "devices/memory_meter.hpp"
#include "support/lone_pipeline.hpp"
#include "support/small_nets.hpp"
#include "support/test_devices.hpp"

#include <string>
#include <vector>

namespace pipeline_cost_test {

using lockstep::Batch;
using lockstep::copy_of;
using lockstep::LonePipeline;
using lockstep::ModelSplit;
using lockstep::PipelineSchedule;
using lockstep::Rank;
using torch::nn::Sequential;
namespace F = torch::nn::functional;
namespace nn = torch::nn;

// The most bytes of tensors that each rank needs in a batch, over what it has before.
std::vector<int64_t> peaks(const Sequential& net, int ranks, const ModelSplit& split) {
  std::vector<int64_t> result(ranks);
  const Batch batch{torch::randn({2048, 64}), torch::randint(64, {2048}), 2048};
  lockstep::run(lockstep::test_devices(ranks), [&](Rank& rank) {
    LonePipeline pipeline(copy_of(net), rank, split);
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
