// Labels: arithmetic
// fast_conv2d against LibTorch's convolution in float64: forward, backward and twice backward, on Winograd's kernels
// and beside them. CMakeLists.txt runs this test once per instruction set that the CPU may have.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <lockstep/models/residual_block.hpp>

#include "models/conv2d.hpp"
#include "models/kernels/kernels.hpp"
#include "support/intra_op_threads.hpp"

#include <ATen/autocast_mode.h>
#include <limits>
#include <string>
#include <vector>

namespace lockstep {
namespace conv2d_test {

using at::MemoryFormat;
using at::Tensor;
using torch::autograd::variable_list;
using torch::nn::Conv2d;
using torch::nn::Conv2dOptions;

Conv2dOptions three_by_three(int64_t in, int64_t out) {
  return Conv2dOptions(in, out, 3).padding(1).bias(false);
}
Conv2d channels_last(Conv2d conv) {
  for (const auto& parameter : conv->parameters()) {
    if (parameter.dim() == 4) parameter.set_data(parameter.contiguous(MemoryFormat::ChannelsLast));
  }
  return conv;
}
Tensor images(at::IntArrayRef sizes) {
  return torch::randn(sizes).contiguous(MemoryFormat::ChannelsLast);
}
Tensor leaf(const Tensor& values) {
  return values.detach().clone(MemoryFormat::Preserve).requires_grad_();
}

// y, and the gradients of x and the weight.
template <class Convolution>
variable_list results_of(const Convolution& convolution, const Tensor& values, const Tensor& weight,
                         const Tensor& grad) {
  const Tensor x = leaf(values), y = convolution(x);
  variable_list results = torch::autograd::grad({y}, {x, weight}, {grad});
  results.insert(results.begin(), y.detach());
  return results;
}

bool ran_kernels(const Tensor& y) {
  return y.grad_fn()->name().find("WinogradConvolution") != std::string::npos;
}
bool has_kernels_for(int64_t in, int64_t out) {
  const auto* const kernels = kernels::of_this_cpu().winograd;
  return kernels != nullptr && in % kernels->panel_channels == 0 && out % kernels->panel_channels == 0;
}

variable_list fast_results(Conv2d conv, const Tensor& x, const Tensor& grad) {
  const auto convolution = [&](const Tensor& x) {
    const Tensor y = fast_conv2d(*conv, x);
    EXPECT_EQ(ran_kernels(y), has_kernels_for(conv->weight.size(1), conv->weight.size(0)));
    return y;
  };
  return results_of(convolution, x, conv->weight, grad);
}
variable_list results_in_float64(const Conv2d& conv, const Tensor& x, const Tensor& grad) {
  const Tensor weight = leaf(conv->weight.to(torch::kDouble));
  return results_of([&](const Tensor& x) { return torch::conv2d(x, weight, {}, 1, 1); }, x.to(torch::kDouble), weight,
                    grad.to(torch::kDouble));
}

double relative_error(const Tensor& actual, const Tensor& expected) {
  return ((actual.to(torch::kDouble) - expected).norm() / expected.norm()).item<double>();
}

// A mean is added to x: the transformation subtracts large neighbours from each other.
void expect_agreement(int64_t n, int64_t in, int64_t out, int64_t height, int64_t width, double mean = 0) {
  SCOPED_TRACE(c10::str(n, " images, ", in, " to ", out, " channels, ", height, " x ", width));
  const Conv2d conv = channels_last(Conv2d(three_by_three(in, out)));
  const Tensor x = images({n, in, height, width}) + mean, grad = images({n, out, height, width});
  const variable_list expected = results_in_float64(conv, x, grad), actual = fast_results(conv, x, grad);
  for (size_t i = 0; i < actual.size(); ++i) {
    EXPECT_EQ(actual[i].sizes(), expected[i].sizes()) << i;
    EXPECT_LE(relative_error(actual[i], expected[i]), 2e-6) << i;
    EXPECT_TRUE(actual[i].is_contiguous(MemoryFormat::ChannelsLast)) << i;
  }
}

TEST(FastConv2d, IsLibTorchsConvolution) {
  torch::manual_seed(1);
  expect_agreement(8, 32, 64, 3, 5);
  expect_agreement(3, 64, 32, 8, 8);
  expect_agreement(5, 96, 160, 7, 7);
  expect_agreement(4, 48, 80, 7, 7);  // the kernels with AVX2 alone
  expect_agreement(16, 160, 96, 2, 9);
  expect_agreement(14, 256, 256, 4, 4);  // one call makes its panels
  expect_agreement(40, 256, 256, 4, 4);
  expect_agreement(24, 32, 32, 14, 14);   // the weight's gradient in several parts
  expect_agreement(18, 160, 96, 14, 14);  // and in several blocks of channels
  expect_agreement(4, 64, 64, 14, 14, /*mean=*/3);
}

TEST(FastConv2d, RunsTheKernelsWhereTheyFit) {
  const auto expect = [&](Conv2d conv, const Tensor& x, bool fits) {
    const Tensor y = fast_conv2d(*conv, leaf(x));
    EXPECT_EQ(ran_kernels(y), fits && kernels::of_this_cpu().winograd != nullptr);
    if (!fits) EXPECT_TRUE(y.equal(conv->forward(x)));
  };
  const Tensor x = images({2, 32, 8, 8});
  expect(Conv2d(three_by_three(32, 32)), x, true);
  expect(Conv2d(three_by_three(32, 64)), x, true);
  expect(Conv2d(three_by_three(32, 32)), images({3, 32, 4, 4}), false);
  expect(Conv2d(three_by_three(32, 32)), images({4, 32, 4, 4}), true);
  expect(Conv2d(three_by_three(128, 128)), images({7, 128, 4, 4}), false);
  expect(Conv2d(three_by_three(128, 128)), images({8, 128, 4, 4}), true);
  expect(Conv2d(three_by_three(32, 32)), x.contiguous(), false);
  expect(Conv2d(three_by_three(32, 33)), x, false);
  expect(Conv2d(three_by_three(33, 32)), images({2, 33, 8, 8}), false);
  expect(Conv2d(three_by_three(32, 32).bias(true)), x, true);
  expect(Conv2d(three_by_three(32, 32).stride(2)), x, false);
  expect(Conv2d(three_by_three(32, 32).stride({1, 2})), x, false);
  expect(Conv2d(three_by_three(32, 32).dilation(2)), x, false);
  expect(Conv2d(three_by_three(32, 32).padding(0)), x, false);
  expect(Conv2d(three_by_three(32, 32).padding({1, 2})), x, false);
  expect(Conv2d(three_by_three(32, 32).padding(torch::kSame)), x, false);
  expect(Conv2d(three_by_three(32, 32).padding_mode(torch::kReflect)), x, false);
  expect(Conv2d(three_by_three(64, 64).groups(2)), images({2, 64, 8, 8}), false);
  expect(Conv2d(Conv2dOptions(32, 32, 1).padding(1).bias(false)), x, false);
  Conv2d in_float64(three_by_three(32, 32));
  in_float64->to(torch::kDouble);
  expect(in_float64, x.to(torch::kDouble), false);
  at::autocast::set_autocast_enabled(at::kCPU, true);
  expect(Conv2d(three_by_three(32, 32)), x, false);
  at::autocast::set_autocast_enabled(at::kCPU, false);
  at::autocast::clear_cache();
  EXPECT_THROW(fast_conv2d(*Conv2d(three_by_three(64, 32)), x), c10::Error);
}

TEST(FastConv2d, TakesWeightsAndGradientsInAnyOrder) {
  torch::manual_seed(2);
  const Conv2d conv(three_by_three(32, 64));
  const Tensor x = images({3, 32, 6, 7}), grad = torch::randn({3, 64, 1, 1}).expand({3, 64, 6, 7});
  const variable_list expected = results_in_float64(conv, x, grad), actual = fast_results(conv, x, grad);
  for (size_t i = 0; i < actual.size(); ++i) EXPECT_LE(relative_error(actual[i], expected[i]), 1.5e-6) << i;
}

TEST(FastConv2d, ComputesTheGradientsThatAreNeeded) {
  torch::manual_seed(3);
  Conv2d conv(three_by_three(32, 32));
  const Tensor x = images({3, 32, 6, 7}), grad = images({3, 32, 6, 7});
  const variable_list all = fast_results(conv, x, grad);
  EXPECT_TRUE(torch::autograd::grad({fast_conv2d(*conv, x)}, {conv->weight}, {grad})[0].equal(all[2]));
  conv->weight.requires_grad_(false);
  const Tensor differentiable = leaf(x);
  EXPECT_TRUE(torch::autograd::grad({fast_conv2d(*conv, differentiable)}, {differentiable}, {grad})[0].equal(all[1]));
  const torch::NoGradGuard no_grad;
  EXPECT_TRUE(fast_conv2d(*conv, x).equal(all[0]));
}

TEST(FastConv2d, CanBeDifferentiatedTwice) {
  torch::manual_seed(4);
  const Conv2d conv(three_by_three(32, 32));
  const Tensor x = images({4, 32, 4, 5});
  const auto second = [](const auto& convolution, const Tensor& values, const Tensor& weight) {
    const Tensor x = leaf(values);
    Tensor sum = torch::zeros({}, x.options());
    for (const auto& grad : torch::autograd::grad({convolution(x).pow(3).sum()}, {x, weight}, {}, true, true)) {
      sum = sum + grad.square().sum();
    }
    return torch::autograd::grad({sum}, {x, weight});
  };
  const Tensor weight = leaf(conv->weight.to(torch::kDouble));
  const auto actual = second([&](const Tensor& x) { return fast_conv2d(*Conv2d(conv), x); }, x, conv->weight);
  const auto expected =
      second([&](const Tensor& x) { return torch::conv2d(x, weight, {}, 1, 1); }, x.to(torch::kDouble), weight);
  for (size_t i = 0; i < actual.size(); ++i) EXPECT_LE(relative_error(actual[i], expected[i]), 1e-5) << i;
}

TEST(FastConv2d, AddsABias) {
  torch::manual_seed(7);
  Conv2d conv(three_by_three(32, 64).bias(true)), without(three_by_three(32, 64));
  without->weight = conv->weight;
  const Tensor x = images({3, 32, 6, 7}), grad = images({3, 64, 6, 7}), y = fast_conv2d(*conv, x);
  EXPECT_TRUE(y.equal(fast_conv2d(*without, x) + conv->bias.view({-1, 1, 1})));
  const Tensor found = torch::autograd::grad({y}, {conv->bias}, {grad})[0];
  EXPECT_LE(relative_error(found, grad.to(torch::kDouble).sum({0, 2, 3})), 1.5e-6);
}

TEST(FastConv2d, GivesTheSameBitsOnAnyNumberOfThreads) {
  if (kernels::of_this_cpu().winograd == nullptr) GTEST_SKIP() << "LibTorch's convolutions do not promise it";
  torch::manual_seed(5);
  // Three threads have one call each of 24 images, and share the call of 7.
  using Sizes = std::vector<int64_t>;
  for (const auto& sizes : {Sizes{30, 32, 13, 11}, Sizes{30, 160, 13, 11}, Sizes{24, 64, 8, 8}, Sizes{7, 160, 8, 8}}) {
    const Conv2d conv(three_by_three(sizes[1], sizes[1]));
    const Tensor x = images(sizes), grad = images(sizes);
    const auto results_on = [&](int threads) {
      const IntraOpThreads set(threads);
      return fast_results(conv, x, grad);
    };
    const variable_list alone = results_on(1), together = results_on(3);
    for (size_t i = 0; i < alone.size(); ++i) EXPECT_TRUE(alone[i].equal(together[i])) << i;
  }
}

// A value that is not finite reaches the pixels that read it, and no other tile of 4 x 4.
TEST(FastConv2d, PassesOnWhatIsNotFinite) {
  torch::manual_seed(6);
  Conv2d conv(three_by_three(32, 32));
  for (const float value : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    Tensor x = images({2, 32, 12, 12});
    x[1][7][5][5] = value;
    const Tensor is_finite = fast_conv2d(*conv, x).isfinite();
    EXPECT_TRUE(is_finite[0].all().item<bool>());
    EXPECT_FALSE(is_finite[1].slice(1, 4, 7).slice(2, 4, 7).any().item<bool>());
    for (const int64_t dimension : {1, 2}) {
      EXPECT_TRUE(is_finite[1].slice(dimension, 0, 4).all().item<bool>());
      EXPECT_TRUE(is_finite[1].slice(dimension, 8).all().item<bool>());
    }
  }
}

TEST(FastConv2d, ChangedInputsAreNoticedInBackward) {
  Conv2d conv(three_by_three(32, 32));
  const Tensor x = images({4, 32, 4, 4}), y = fast_conv2d(*conv, x);
  x.zero_();
  EXPECT_THROW(y.sum().backward(), c10::Error);
}

TEST(FastConv2d, IsWhatAResidualBlockIsMadeOf) {
  torch::manual_seed(7);
  ResidualBlock block(32, 32);
  const auto in_float64 = std::dynamic_pointer_cast<ResidualBlockImpl>(block->clone());
  in_float64->to(torch::kDouble);
  const Tensor x = images({6, 32, 7, 7}), expected = in_float64->forward(x.to(torch::kDouble));
  const Tensor y = block->forward(x);
  EXPECT_LE(relative_error(y, expected), 1e-5);
  const variable_list grads = torch::autograd::grad({y}, block->parameters(), {torch::ones_like(y)});
  const variable_list in64 = torch::autograd::grad({expected}, in_float64->parameters(), {torch::ones_like(expected)});
  for (size_t i = 0; i < grads.size(); ++i) EXPECT_LE(relative_error(grads[i], in64[i]), 1e-4) << i;
}

}  // namespace conv2d_test
}  // namespace lockstep
