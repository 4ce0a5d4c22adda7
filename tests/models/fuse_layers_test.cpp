// Labels: gpu
// fuse_layers: the net computes what it computed, by lockstep's kernels on CPUs and by fewer on a GPU; and what it
// leaves alone.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/devices/autocast.hpp>
#include <lockstep/devices/device_info.hpp>
#include <lockstep/devices/memory_format.hpp>
#include <lockstep/models/fuse_layers.hpp>
#include <lockstep/models/linear.hpp>
#include <lockstep/models/models.hpp>

#include "models/kernels/kernels.hpp"
#include "support/simulated_device.hpp"

#include <limits>
#include <memory>
#include <sstream>
#include <typeinfo>
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
    for (const auto& sizes : {std::vector<int64_t>{5, 6}, {2, 3, 6}}) {
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

// Each kind of layer that has one in its place, and others that look alike.
nn::Sequential image_net() {
  torch::manual_seed(1);
  nn::Sequential net(nn::Conv2d(1, 32, 3), nn::ReLU(), nn::AvgPool2d(2), nn::BatchNorm2d(32), nn::ReLU(),
                     nn::Conv2d(nn::Conv2dOptions(32, 32, 3).padding(1)), nn::ReLU(),
                     nn::AvgPool2d(nn::AvgPool2dOptions(2).stride(1)),
                     nn::Conv2d(nn::Conv2dOptions(32, 32, 3).padding(1).bias(false)), nn::BatchNorm2d(32), nn::ReLU(),
                     nn::Conv2d(nn::Conv2dOptions(32, 32, 3).stride(2).padding_mode(torch::kCircular).padding(1)),
                     nn::ReLU(), nn::AvgPool2d(2), nn::Flatten(), nn::Linear(128, 10));
  lockstep::set_memory_format(*net, torch::MemoryFormat::ChannelsLast);
  return net;
}

torch::Tensor gradients_of(nn::Sequential& net, torch::Tensor x) {
  net->zero_grad();
  x = x.detach().requires_grad_();
  net->forward(x).square().sum().backward();
  std::vector<torch::Tensor> all = {x.grad().flatten()};
  for (const auto& parameter : net->parameters()) {
    if (parameter.requires_grad()) all.push_back(parameter.grad().flatten());
  }
  return torch::cat(all);
}

TEST(FuseLayers, TakesEachKindOfLayer) {
  for (const auto& device : devices()) {
    SCOPED_TRACE(device.str());
    for (const auto type : {torch::kFloat, torch::kDouble}) {
      nn::Sequential plain = image_net(), fused = image_net();
      for (auto net : {plain, fused}) {
        net->to(device, type);
        net->ptr(0)->parameters()[0].requires_grad_(false);
      }
      const auto before = fused->parameters();
      EXPECT_EQ(fuse_layers(*fused), 0) << "none saves a kernel";
      const auto keeps_its_class = [&](size_t place) {
        const nn::Module &now = *fused->ptr(place), &before_it = *plain->ptr(place);
        return typeid(now) == typeid(before_it);
      };
      for (const size_t place : {0, 3, 5, 8, 9, 11, 15}) EXPECT_FALSE(keeps_its_class(place)) << place;
      for (const size_t place : {1, 2, 4, 10}) EXPECT_TRUE(fused->ptr(place)->as<nn::IdentityImpl>()) << place;
      for (const size_t place : {6, 7, 12, 13}) EXPECT_TRUE(keeps_its_class(place)) << place;
      for (size_t i = 0; i < before.size(); ++i) EXPECT_TRUE(fused->parameters()[i].is_same(before[i]));
      EXPECT_EQ(fused->named_parameters().keys(), plain->named_parameters().keys());
      EXPECT_EQ(fused->named_buffers().keys(), plain->named_buffers().keys());

      const auto x = torch::randn({8, 1, 18, 18}, torch::TensorOptions(device).dtype(type));
      expect_near(gradients_of(fused, x), gradients_of(plain, x), 1e-3);
      for (size_t i = 0; i < plain->buffers().size(); ++i) expect_near(fused->buffers()[i], plain->buffers()[i]);
      fused->eval();
      plain->eval();
      const auto copy = std::dynamic_pointer_cast<nn::SequentialImpl>(fused->clone());
      const nn::Module &first = *fused->ptr(0), &first_copy = *copy->ptr(0);
      EXPECT_EQ(typeid(first_copy), typeid(first));
      for (auto net : {fused, nn::Sequential(copy)}) expect_near(net->forward(x), plain->forward(x), 1e-4);
    }
  }
}

TEST(FuseLayers, TakesFilesOfPlainNets) {
  nn::Sequential plain = image_net(), fused = image_net();
  fuse_layers(*fused);
  const auto x = torch::randn({8, 1, 18, 18});
  plain->forward(x);
  for (const auto& parameter : plain->parameters()) parameter.data().add_(0.01);
  std::stringstream file;
  torch::save(plain, file);
  torch::load(fused, file);
  plain->eval();
  fused->eval();
  expect_near(fused->forward(x), plain->forward(x), 1e-4);
}

TEST(FuseLayers, TakesAnImageWithoutABatch) {
  nn::Sequential net(nn::Conv2d(1, 4, 3), nn::ReLU(), nn::AvgPool2d(2));
  const auto x = torch::randn({1, 9, 8});
  const auto expected = net->forward(x);
  fuse_layers(*net);
  EXPECT_TRUE(net->forward(x).equal(expected));
}

TEST(FuseLayers, CallsTheKernels) {
  const auto names_of = [](nn::Sequential net, const torch::Tensor& x) {
    fuse_layers(*net);
    return net->forward(x.contiguous(torch::MemoryFormat::ChannelsLast)).grad_fn()->name();
  };
  const auto image = torch::randn({32, 32, 6, 6});
  EXPECT_THAT(names_of(nn::Sequential(nn::BatchNorm2d(32), nn::ReLU()), image), testing::HasSubstr("BatchNormRelu"));
  EXPECT_THAT(names_of(nn::Sequential(nn::Conv2d(32, 4, 3), nn::ReLU(), nn::AvgPool2d(2)), image),
              testing::HasSubstr("ConvReluPool"));
  EXPECT_THAT(names_of(nn::Sequential(nn::Conv2d(nn::Conv2dOptions(32, 32, 3).padding(1))), image),
              testing::HasSubstr(lockstep::kernels::of_this_cpu().winograd ? "Winograd" : "Convolution"));
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
  EXPECT_THAT(text.str(), testing::HasSubstr("lockstep::LinearRelu: torch::nn::Linear(in_features=6"));
}

}  // namespace fuse_layers_test
