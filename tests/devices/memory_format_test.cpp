// set_memory_format: other strides, the same network.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/devices/memory_format.hpp>

namespace memory_format_test {

using at::MemoryFormat;

torch::nn::Sequential some_net() {
  torch::manual_seed(4);
  torch::nn::Sequential net(torch::nn::Conv2d(3, 8, 3), torch::nn::BatchNorm2d(8), torch::nn::ReLU(),
                            torch::nn::Conv2d(8, 4, 3), torch::nn::Flatten(), torch::nn::Linear(4 * 6 * 6, 5));
  net->to(torch::kDouble);
  return net;
}

TEST(MemoryFormat, ChangesStridesAndNotTheFunction) {
  auto contiguous = some_net(), channels_last = some_net();
  lockstep::set_memory_format(*channels_last, MemoryFormat::ChannelsLast);
  const torch::Tensor x = torch::randn({7, 3, 10, 10}, torch::kDouble);
  const torch::Tensor expected = contiguous->forward(x);
  const torch::Tensor y = channels_last->forward(x.contiguous(MemoryFormat::ChannelsLast));
  EXPECT_TRUE(torch::allclose(y, expected, 1e-12, 1e-12));
  expected.square().sum().backward();
  y.square().sum().backward();
  const auto reference = contiguous->named_parameters();
  for (const auto& item : channels_last->named_parameters()) {
    const torch::Tensor& weight = item.value();
    EXPECT_TRUE(weight.is_leaf() && weight.requires_grad()) << item.key();
    EXPECT_TRUE(torch::equal(weight, reference[item.key()])) << item.key();
    EXPECT_TRUE(torch::allclose(weight.grad(), reference[item.key()].grad(), 1e-10, 1e-10)) << item.key();
    EXPECT_EQ(weight.dim() == 4, !weight.is_contiguous()) << item.key();
    if (weight.dim() == 4) EXPECT_TRUE(weight.is_contiguous(MemoryFormat::ChannelsLast)) << item.key();
  }
  lockstep::set_memory_format(*channels_last, MemoryFormat::Contiguous);
  for (const auto& weight : channels_last->parameters()) EXPECT_TRUE(weight.is_contiguous());
}

// Their memory has the order of both formats, so only the weight's strides can tell.
TEST(MemoryFormat, OfOneChannelIsPassedOnByAConvolution) {
  torch::nn::Sequential net(torch::nn::Conv2d(1, 8, 3));
  lockstep::set_memory_format(*net, MemoryFormat::ChannelsLast);
  const torch::Tensor y = net->forward(torch::rand({4, 1, 9, 9}));
  EXPECT_TRUE(y.is_contiguous(MemoryFormat::ChannelsLast)) << y.strides();
  lockstep::set_memory_format(*net, MemoryFormat::Contiguous);
  const torch::Tensor z = net->forward(torch::rand({4, 1, 9, 9}));
  EXPECT_TRUE(z.is_contiguous()) << z.strides();
}

}  // namespace memory_format_test
