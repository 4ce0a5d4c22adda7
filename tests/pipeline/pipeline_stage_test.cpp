// Labels: concurrency
// PipelineStage: what a stage leaves as it is where no graphs are kept.
#include <gmock/gmock.h>
#include <torch/torch.h>

#include "data_parallel/grain_statistics.hpp"
#include "pipeline/pipeline_stage.hpp"
#include "support/group_tests.hpp"
#include "support/tensor_bits.hpp"

namespace lockstep {
namespace pipeline_stage_test {

using torch::Tensor;
namespace nn = torch::nn;

// A pipeline's stage that keeps no graphs forwards once without gradients, and again in its backward.
TEST(PipelineStageTest, LeavesGrainStatisticsWhereItComputesAForwardAgain) {
  constexpr int grains = 7;
  torch::manual_seed(3);
  nn::Sequential layers(nn::Linear(4, 6), nn::BatchNorm1d(6), nn::Tanh()), plain = copy_of(layers);
  const Tensor x = torch::randn({grains, 5, 4});
  for (int grain = 0; grain < grains; ++grain) plain->forward(x[grain]).sum().backward();
  run(test_devices(1), [&](Rank& rank) {
    GrainStatistics statistics(*layers, rank);
    PipelineStage stage(0, layers);
    const PipelineStage::Head sum = [](const Tensor& y) { return y.sum(); };
    const TensorBits before = tensor_bits(*layers);
    for (int grain = 0; grain < grains; ++grain) {
      statistics.forward(grain, [&] { stage.forward(grain, x[grain], sum, /*keep_graph=*/false); });
    }
    for (int grain = 0; grain < grains; ++grain) {
      stage.backward(grain, {}, 1);
    }
    EXPECT_EQ(tensor_bits(*layers), before);
    statistics.finish({0, grains});
    for (const auto& buffer : layers->named_buffers()) {
      expect_near(buffer.value(), plain->named_buffers()[buffer.key()], 1e-6, buffer.key());
    }
    for (const auto& parameter : layers->named_parameters()) {
      expect_near(parameter.value().grad(), plain->named_parameters()[parameter.key()].grad(), 1e-5, parameter.key());
    }
  });
}

}  // namespace pipeline_stage_test
}  // namespace lockstep
