// Labels: gpu
// fuse_layers: the net computes what it computed, by fewer kernels on a GPU; and what it leaves alone.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/devices/autocast.hpp>
#include <lockstep/devices/device_info.hpp>
#include <lockstep/models/fuse_layers.hpp>
#include <lockstep/models/linear.hpp>
#include <lockstep/models/models.hpp>

#include "support/simulated_device.hpp"

#include <limits>
#include <sstream>
#include <vector>

namespace fuse_layers_test {

namespace nn = torch::nn;
using lockstep::fuse_layers;

// A module of somebody's own, since a Sequential cannot be in a Sequential.
struct BlockImpl : nn::Cloneable<BlockImpl> {
  BlockImpl() { reset(); }
  void reset() override { layers = register_module("layers", nn::Sequential(lockstep::FastLinear(16, 8), nn::ReLU())); }
  torch::Tensor forward(const torch::Tensor& x) { return layers->forward(x); }
  nn::Sequential layers{nullptr};
};
TORCH_MODULE(Block);

nn::Sequential net_of() {
  torch::manual_seed(1);
  return nn::Sequential(nn::Linear(6, 16), nn::ReLU(), Block(), nn::Linear(nn::LinearOptions(8, 8).bias(false)),
                        nn::ReLU(), nn::Linear(8, 8), nn::Tanh(), nn::ReLU(), nn::Linear(8, 3));
}

std::vector<torch::Device> devices() {
  std::vector<torch::Device> devices = {torch::kCPU};
  if (!lockstep::gpus().empty()) devices.push_back(lockstep::gpus()[0]);
  return devices;
}

void expect_near(const torch::Tensor& actual, const torch::Tensor& expected, double tolerance = 1e-5) {
  EXPECT_TRUE(actual.to(torch::kFloat).allclose(expected.to(torch::kFloat), tolerance, tolerance))
      << actual << expected;
}

TEST(FuseLayers, KeepsNamesParametersAndResults) {
  for (const auto& device : devices()) {
    SCOPED_TRACE(device.str());
    for (const torch::IntArrayRef sizes : {torch::IntArrayRef{5, 6}, torch::IntArrayRef{2, 3, 6}}) {
      nn::Sequential plain = net_of(), fused = net_of();
      plain->to(device);
      fused->to(device);
      const auto before = fused->parameters();
      EXPECT_EQ(fuse_layers(*fused), 2);
      EXPECT_EQ(fuse_layers(*fused), 0);
      const auto copy = std::dynamic_pointer_cast<nn::SequentialImpl>(fused->clone());
      EXPECT_EQ(fused->named_parameters().keys(), plain->named_parameters().keys());
      EXPECT_EQ(fused->named_children().keys(), plain->named_children().keys());
      for (size_t i = 0; i < before.size(); ++i) EXPECT_TRUE(fused->parameters()[i].is_same(before[i]));

      auto x = torch::randn(sizes).to(device).requires_grad_(), same = x.detach().clone().requires_grad_();
      auto y = fused->forward(x), expected = plain->forward(same);
      expect_near(y, expected);
      expect_near(copy->forward(x), expected);
      y.square().sum().backward();
      expected.square().sum().backward();
      expect_near(x.grad(), same.grad());
      for (size_t i = 0; i < before.size(); ++i)
        expect_near(fused->parameters()[i].grad(), plain->parameters()[i].grad());
    }
  }
}

TEST(FuseLayers, TakesTheTypesOfAutocastAndASecondDerivative) {
  for (const auto& device : devices()) {
    SCOPED_TRACE(device.str());
    const auto options = torch::TensorOptions(device).dtype(torch::kDouble);
    const auto random = [&](torch::IntArrayRef sizes) { return torch::randn(sizes).to(options).requires_grad_(); };
    const auto x = random({4, 3}), weight = random({5, 3}), bias = random({5});
    const auto second = [&](const torch::Tensor& y) {
      const auto first = torch::autograd::grad({y.pow(3).sum()}, {weight}, {}, true, true)[0];
      return torch::autograd::grad({first.square().sum()}, {x, weight, bias});
    };
    const auto mine = second(lockstep::linear_relu(x, weight, bias));
    const auto theirs = second(torch::relu(torch::linear(x, weight, bias)));
    for (size_t i = 0; i < mine.size(); ++i) expect_near(mine[i], theirs[i]);

    const auto f = [](const torch::Tensor& tensor) { return tensor.detach().to(torch::kFloat); };
    const lockstep::Autocast bf16(device);
    const auto low = lockstep::linear_relu(f(x), f(weight), f(bias));
    EXPECT_EQ(low.scalar_type(), torch::kBFloat16);
    expect_near(low, torch::relu(torch::linear(f(x), f(weight), f(bias))), 0.02);
  }
}

// Otherwise nobody would see that a net has diverged.
TEST(FuseLayers, KeepsANaN) {
  for (const auto& device : devices()) {
    const auto x = torch::full({16, 16}, std::numeric_limits<float>::quiet_NaN(), device);
    const auto y = lockstep::linear_relu(x, torch::ones({16, 16}, device), torch::ones({16}, device));
    EXPECT_TRUE(y.isnan().all().item<bool>()) << device;
  }
}

TEST(FuseLayers, SavesAKernelForEachPair) {
  if (!lockstep::simulated::is_there()) GTEST_SKIP() << "only simulated GPUs count their kernels";
  const auto device = lockstep::gpus()[0];
  const auto launches = [&](nn::Sequential net) {
    net->to(device);
    const auto x = torch::ones({4, 6}, device);
    net->forward(x);
    const int64_t before = lockstep::simulated::launches();
    net->forward(x).sum().backward();
    return lockstep::simulated::launches() - before;
  };
  nn::Sequential fused = net_of();
  fuse_layers(*fused);
  EXPECT_EQ(launches(net_of()) - launches(fused), 2);
}

TEST(FuseLayers, SaysWhatTheLayersAre) {
  nn::Sequential net = net_of();
  fuse_layers(*net);
  std::ostringstream text;
  text << *net;
  EXPECT_THAT(text.str(), testing::HasSubstr("lockstep::LinearRelu(6, 16)"));
}

}  // namespace fuse_layers_test
