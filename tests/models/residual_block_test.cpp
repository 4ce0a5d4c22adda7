// Labels: concurrency arithmetic
// ResidualBlock against the formula of He et al., written with LibTorch's functions.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <lockstep/data_parallel/convert_sync_batchnorm.hpp>
#include <lockstep/data_parallel/data_parallel.hpp>
#include <lockstep/models/residual_block.hpp>

#include "support/error_of.hpp"
#include "support/group_tests.hpp"

#include <memory>
#include <string>

namespace lockstep {
namespace residual_block_test {

torch::Tensor normalised(const torch::Tensor& x, const torch::nn::BatchNorm2d& norm) {
  const auto mean = x.mean({0, 2, 3}, /*keepdim=*/true), variance = x.var({0, 2, 3}, /*unbiased=*/false, true);
  const auto per_channel = [](const torch::Tensor& values) { return values.view({1, -1, 1, 1}); };
  return (x - mean) / (variance + 1e-5).sqrt() * per_channel(norm->weight) + per_channel(norm->bias);
}

torch::nn::BatchNorm2d batch_norm(const torch::nn::AnyModule& norm) {
  return std::dynamic_pointer_cast<torch::nn::BatchNorm2dImpl>(norm.ptr());
}

ResidualBlock random_block(int64_t in, int64_t out, int64_t stride) {
  ResidualBlock block(in, out, stride);
  block->to(torch::kDouble);
  const torch::NoGradGuard no_grad;
  for (const auto& parameter : block->parameters()) parameter.normal_();  // BatchNorm's too
  return block;
}

void expect_formula(ResidualBlock block, int64_t in, int64_t stride) {
  const auto x = torch::randn({3, in, 7, 6}, torch::kDouble);
  auto y = torch::conv2d(x, block->conv1->weight, {}, stride, /*padding=*/1);
  y = torch::conv2d(torch::relu(normalised(y, batch_norm(block->norm1))), block->conv2->weight, {}, 1, /*padding=*/1);
  auto beside = x;
  if (!block->shortcut->is_empty()) {
    const auto parameters = block->shortcut->named_parameters();
    const torch::nn::BatchNorm2d norm(std::dynamic_pointer_cast<torch::nn::BatchNorm2dImpl>(block->shortcut->ptr(1)));
    beside = normalised(torch::conv2d(x, parameters["0.weight"], {}, stride), norm);
  }
  const auto expected = torch::relu(normalised(y, batch_norm(block->norm2)) + beside);
  const auto before = x.clone();
  const auto actual = torch::nn::Sequential(block)->forward(x);
  EXPECT_TRUE(actual.allclose(expected, 1e-10, 1e-10));
  EXPECT_TRUE(x.equal(before));

  const auto grad = torch::randn(expected.sizes(), torch::kDouble);
  const auto grads = torch::autograd::grad({actual}, block->parameters(), {grad});
  const auto expected_grads = torch::autograd::grad({expected}, block->parameters(), {grad});
  for (size_t i = 0; i < grads.size(); ++i) EXPECT_TRUE(grads[i].allclose(expected_grads[i], 1e-8, 1e-8)) << i;
}

TEST(ResidualBlock, IsTheFormula) {
  torch::manual_seed(1);
  expect_formula(random_block(4, 4, 1), 4, 1);
  expect_formula(random_block(4, 6, 1), 4, 1);
  expect_formula(random_block(4, 4, 2), 4, 2);
  expect_formula(random_block(2, 8, 2), 2, 2);
}

TEST(ResidualBlock, HasAShortCutLayerWhereShapesChange) {
  EXPECT_TRUE(ResidualBlock(4, 4)->shortcut->is_empty());
  EXPECT_EQ(ResidualBlock(4, 8)->shortcut->size(), 2u);
  ResidualBlock halves(4, 4, 2);
  EXPECT_EQ(halves->shortcut->size(), 2u);
  EXPECT_EQ(halves->forward(torch::rand({2, 4, 7, 6})).sizes(), at::IntArrayRef({2, 4, 4, 3}));
}

TEST(ResidualBlock, CloneComputesTheSameWithTensorsOfItsOwn) {
  torch::manual_seed(2);
  ResidualBlock block = random_block(3, 5, 2);
  const auto clone = std::dynamic_pointer_cast<ResidualBlockImpl>(block->clone());
  ASSERT_NE(clone, nullptr);
  EXPECT_EQ(clone->named_parameters().keys(), block->named_parameters().keys());
  const auto x = torch::randn({4, 3, 5, 5}, torch::kDouble);
  EXPECT_TRUE(clone->forward(x).equal(block->forward(x)));
  const torch::NoGradGuard no_grad;
  clone->shortcut->parameters()[0].zero_();
  EXPECT_GT(block->shortcut->parameters()[0].abs().max().item<double>(), 0);
}

torch::nn::Sequential classifier_of(const ResidualBlock& block) {
  torch::manual_seed(3);
  torch::nn::Sequential net(std::dynamic_pointer_cast<ResidualBlockImpl>(block->clone()),
                            torch::nn::AdaptiveAvgPool2d(1), torch::nn::Flatten(), torch::nn::Linear(6, 3));
  net->to(torch::kDouble);
  return net;
}

// The third rank has none of two samples.
TEST(ResidualBlock, WithSyncBatchNormsItIsThatOfTheWholeBatch) {
  namespace F = torch::nn::functional;
  torch::manual_seed(3);
  for (const ResidualBlock& block : {random_block(6, 6, 1), random_block(4, 6, 2)}) {
    for (const int64_t samples : {7, 2}) {
      const auto x = torch::randn({samples, block->conv1->weight.size(1), 6, 5}, torch::kDouble);
      const auto y = torch::randint(3, {samples});
      auto whole = classifier_of(block);
      F::cross_entropy(whole->forward(x), y).backward();
      run(test_devices(3), [&](Rank& rank) {
        auto layers = rank.in_turn([&] { return classifier_of(block); });
        EXPECT_EQ(convert_sync_batchnorm(*layers, rank), block->shortcut->is_empty() ? 2 : 3);
        EXPECT_EQ(convert_sync_batchnorm(*copy_of(layers), rank), 0);  // a clone has the synchronised kind too
        DataParallel net(layers, rank);
        net.loss({slice_of(x, 0, rank), slice_of(y, 0, rank), samples}, F::cross_entropy).backward();
        for (const auto& item : layers->named_parameters()) {
          expect_near(item.value().grad(), whole->named_parameters()[item.key()].grad(), 1e-10, item.key());
        }
        for (const auto& item : layers->named_buffers()) {
          const auto expected = whole->named_buffers()[item.key()];
          expect_near(item.value().to(torch::kDouble), expected.to(torch::kDouble), 1e-10, item.key());
        }
      });
    }
  }
}

TEST(ResidualBlock, RefusesSizesBelowOne) {
  EXPECT_THAT(error_of([] { ResidualBlock(4, 4, 0); }), Refused());
}

}  // namespace residual_block_test
}  // namespace lockstep
