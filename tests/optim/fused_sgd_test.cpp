// FusedSgd against LibTorch's own SGD.
#include "optim/fused_sgd.hpp"

#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/models/models.hpp>

#include "support/error_of.hpp"

namespace fused_sgd_test {

using lockstep::error_of;
using lockstep::FusedSgd;
using testing::AllOf;
using testing::HasSubstr;

std::vector<torch::Tensor> some_weights(at::ScalarType type) {
  torch::manual_seed(3);
  std::vector<torch::Tensor> weights;
  for (const auto& shape : std::vector<std::vector<int64_t>>{{50, 20, 5, 5}, {50}, {800, 128}, {7}, {1}}) {
    weights.push_back(torch::randn(shape, type).requires_grad_());
  }
  weights[0].set_data(weights[0].detach().contiguous(at::MemoryFormat::ChannelsLast));
  return weights;
}

TEST(FusedSgd, StepsAsTheReferenceDoes) {
  for (const auto type : {torch::kFloat, torch::kDouble}) {
    const auto mine = some_weights(type), theirs = some_weights(type);
    FusedSgd fused(mine, 0.2);
    torch::optim::SGD reference(theirs, 0.2);
    for (int step = 0; step < 10; ++step) {
      for (size_t i = 0; i < mine.size(); ++i) {
        const torch::Tensor gradient = torch::randn_like(mine[i]);
        mine[i].mutable_grad() = gradient;
        theirs[i].mutable_grad() = gradient.clone();
      }
      fused.step();
      reference.step();
      for (size_t i = 0; i < mine.size(); ++i) {
        const double relative = type == torch::kFloat ? 1e-6 : 1e-15;  // a fused multiply-add rounds once
        EXPECT_TRUE(torch::allclose(mine[i], theirs[i], relative, relative)) << "weight " << i << ", step " << step;
      }
    }
  }
}

TEST(FusedSgd, LeavesWhatHasNoGradient) {
  const auto weights = some_weights(torch::kFloat);
  const auto before = weights[1].detach().clone();
  weights[2].mutable_grad() = torch::ones_like(weights[2]);
  FusedSgd sgd(weights, 0.5);
  const auto expected = weights[2].detach() - 0.5;
  sgd.zero_grad();
  sgd.step();
  EXPECT_FALSE(torch::allclose(weights[2], expected));
  weights[2].mutable_grad().fill_(1);
  sgd.step();
  EXPECT_TRUE(torch::allclose(weights[2], expected));
  EXPECT_TRUE(torch::equal(weights[1], before));
  FusedSgd({}, 0.1).step();
}

TEST(FusedSgd, ZeroesGradientsWhereTheyLie) {
  const auto weights = some_weights(torch::kFloat);
  weights[2].mutable_grad() = torch::ones_like(weights[2]);
  const void* const place = weights[2].grad().const_data_ptr();
  FusedSgd(weights, 0.5).zero_grad();
  EXPECT_EQ(weights[2].grad().const_data_ptr(), place);
  EXPECT_EQ(weights[2].grad().abs().max().item<float>(), 0);
  EXPECT_FALSE(weights[1].grad().defined());
}

TEST(FusedSgd, RefusesSeveralTypes) {
  EXPECT_THAT(error_of([] {
                FusedSgd({torch::zeros({2}), torch::zeros({2}, torch::kDouble)}, 0.1);
              }),
              AllOf(HasSubstr("Float on cpu"), HasSubstr("Double on cpu")));
}

}  // namespace fused_sgd_test
