// Labels: concurrency arithmetic
// conv_relu_pool against LibTorch's three operators: forward, backward and twice backward, on the kernels and beside
// them. CMakeLists.txt runs this test once per instruction set that the CPU may have.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <lockstep/devices/autocast.hpp>
#include <lockstep/models/conv_relu_pool.hpp>

#include "devices/micro_kernel.hpp"
#include "models/kernels/kernels.hpp"
#include "support/error_of.hpp"
#include "support/intra_op_threads.hpp"

#include <cmath>
#include <limits>
#include <thread>

namespace lockstep {
namespace conv_relu_pool_test {

using testing::HasSubstr;
using torch::autograd::variable_list;

at::Tensor reference(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  return torch::avg_pool2d(torch::relu(torch::conv2d(x, weight, bias)), 2);
}

struct Sizes {
  int64_t samples, channels, height, width, out_channels, kernel_height, kernel_width;
};

std::ostream& operator<<(std::ostream& out, const Sizes& s) {
  return out << s.samples << " images of " << s.channels << "x" << s.height << "x" << s.width << ", kernel "
             << s.out_channels << "x" << s.kernel_height << "x" << s.kernel_width;
}

struct Inputs {
  at::Tensor x, weight, bias;
};

// Small whole numbers, whose sums are exact in any order: a rounded sum near 0 may pass one ReLU and not the other.
at::Tensor whole_numbers(at::IntArrayRef sizes, torch::Dtype type) {
  return torch::randint(-3, 4, sizes, type);
}

Inputs random_inputs(const Sizes& s, torch::Dtype type = torch::kFloat) {
  return {whole_numbers({s.samples, s.channels, s.height, s.width}, type).requires_grad_(),
          whole_numbers({s.out_channels, s.channels, s.kernel_height, s.kernel_width}, type).requires_grad_(),
          whole_numbers({s.out_channels}, type).requires_grad_()};
}

// Equal up to what another order of `terms` additions, or another algorithm, does.
void expect_close(const at::Tensor& actual, const at::Tensor& expected, int64_t terms, const char* what) {
  ASSERT_EQ(actual.defined(), expected.defined()) << what;
  if (!actual.defined()) return;
  ASSERT_EQ(actual.sizes(), expected.sizes()) << what;
  EXPECT_EQ(actual.scalar_type(), expected.scalar_type()) << what;
  if (actual.numel() == 0) return;
  const double epsilon = actual.scalar_type() == torch::kDouble ? 1e-15 : 1e-7;
  const double size = std::max(1.0, expected.abs().max().item<double>());
  const double error = (actual - expected).abs().max().item<double>();
  EXPECT_LE(error, size * epsilon * (10 + 2 * std::sqrt(static_cast<double>(terms)))) << what;
}

void expect_agreement(const Inputs& in) {
  const auto grad_inputs = [](const Inputs& from) {
    variable_list list;
    for (const auto& tensor : {from.x, from.weight, from.bias}) {
      if (tensor.defined() && tensor.requires_grad()) list.push_back(tensor);
    }
    return list;
  };
  const at::Tensor out = conv_relu_pool(in.x, in.weight, in.bias);
  const at::Tensor expected = reference(in.x, in.weight, in.bias);
  expect_close(out, expected, in.weight.numel() / in.weight.size(0), "out");
  EXPECT_TRUE(out.is_contiguous());
  EXPECT_EQ(out.requires_grad(), expected.requires_grad());
  if (!expected.requires_grad()) return;
  const at::Tensor grad = whole_numbers(expected.sizes(), expected.scalar_type());
  const variable_list grads = torch::autograd::grad({out}, grad_inputs(in), {grad});
  const variable_list expected_grads = torch::autograd::grad({expected}, grad_inputs(in), {grad});
  for (size_t i = 0; i < grads.size(); ++i) {
    expect_close(grads[i], expected_grads[i], expected.numel(), ("gradient " + std::to_string(i)).c_str());
  }
}

class Shapes : public testing::TestWithParam<Sizes> {};

TEST_P(Shapes, AgreeWithLibTorch) {
  torch::manual_seed(1);
  expect_agreement(random_inputs(GetParam()));
}

INSTANTIATE_TEST_SUITE_P(
    ConvReluPool, Shapes,
    testing::Values(Sizes{128, 1, 28, 28, 20, 3, 3},  // LeNet's
                    Sizes{128, 20, 13, 13, 50, 5, 5}, Sizes{1, 1, 28, 28, 20, 3, 3}, Sizes{5, 20, 13, 13, 50, 5, 5},
                    Sizes{0, 3, 9, 9, 4, 3, 3}, Sizes{6, 1, 2, 2, 1, 1, 1},         // one pooled pixel
                    Sizes{8, 1, 3, 2, 1, 2, 1},                                     // the same
                    Sizes{17, 3, 33, 6, 7, 1, 5},                                   // kernels that are not square
                    Sizes{15, 2, 12, 31, 6, 5, 1}, Sizes{16, 4, 20, 20, 8, 7, 11},  // wider than a tile
                    Sizes{33, 5, 8, 50, 3, 2, 2},                                   // a row of many pooled pixels
                    Sizes{7, 130, 5, 6, 70, 3, 3},    // many channels; this and the next five by AMX
                    Sizes{33, 20, 9, 12, 41, 3, 11},  // a row is as wide as the kernel and one more
                    Sizes{16, 66, 5, 6, 64, 1, 1}, Sizes{17, 20, 5, 18, 25, 2, 17}, Sizes{17, 20, 6, 41, 24, 3, 3},
                    Sizes{40, 22, 31, 8, 66, 5, 2}, Sizes{300, 2, 6, 6, 2, 3, 3}));

TEST(ConvReluPool, AgreesOnRandomShapes) {
  torch::manual_seed(2);
  for (int round = 0; round < 60; ++round) {
    const auto draw = [](int64_t low, int64_t high) { return torch::randint(low, high + 1, {}).item<int64_t>(); };
    Sizes sizes{.samples = draw(1, 40), .channels = draw(1, 9), .out_channels = draw(1, 20)};
    sizes.kernel_height = draw(1, 7);
    sizes.kernel_width = draw(1, 7);
    sizes.height = sizes.kernel_height + draw(1, 12);
    sizes.width = sizes.kernel_width + draw(1, 12);
    SCOPED_TRACE(testing::Message() << sizes);
    expect_agreement(random_inputs(sizes));
  }
}

// Nearly all sums are positive, so that no ReLU is near its edge. Sums are short, so that a part that a factor lost
// would show: most weights are 0.
TEST(ConvReluPool, IsAsExactAsFloat32) {
  torch::manual_seed(14);
  for (const int64_t channels : {7, 64}) {
    const at::Tensor x = torch::rand({32, channels, 3, 3}), weight = torch::zeros({64, channels, 1, 1}),
                     bias = torch::rand({64}), grad = torch::rand({32, 64, 1, 1}) - 0.1;
    weight.narrow(0, 0, 8).narrow(1, 0, 7).uniform_(-0.1, 0.9);
    const auto results = [&](const auto& layer, torch::Dtype type) {
      variable_list inputs;
      for (const auto& tensor : {x, weight, bias}) inputs.push_back(tensor.to(type).requires_grad_());
      const at::Tensor out = layer(inputs[0], inputs[1], inputs[2]);
      variable_list all = torch::autograd::grad({out}, inputs, {grad.to(type)});
      all.push_back(out);
      return all;
    };
    const variable_list exact = results(reference, torch::kDouble), actual = results(conv_relu_pool, torch::kFloat);
    for (size_t i = 0; i < exact.size(); ++i) {
      const at::Tensor error = (actual[i] - exact[i]).abs().mean() / exact[i].abs().mean();
      EXPECT_LE(error.item<double>(), 1.5e-7) << i;
    }
  }
}

TEST(ConvReluPool, ComputesOnlyTheGradientsThatAreAskedFor) {
  torch::manual_seed(3);
  for (int subset = 0; subset < 8; ++subset) {
    SCOPED_TRACE(subset);
    Inputs in = random_inputs({7, 3, 8, 9, 6, 3, 2});
    in.x.requires_grad_((subset & 1) != 0);
    in.weight.requires_grad_((subset & 2) != 0);
    in.bias.requires_grad_((subset & 4) != 0);
    expect_agreement(in);
  }
}

TEST(ConvReluPool, WorksWithoutBias) {
  torch::manual_seed(4);
  Inputs in = random_inputs({18, 3, 8, 9, 6, 3, 2});
  in.bias = at::Tensor();
  expect_agreement(in);
}

TEST(ConvReluPool, TakesTensorsOfAnyStrides) {
  torch::manual_seed(5);
  const Inputs in = random_inputs({19, 4, 10, 12, 6, 3, 5});
  const auto strange = [](const at::Tensor& tensor) {  // the same values, other strides
    return tensor.detach().transpose(0, tensor.dim() - 1).contiguous().transpose(0, tensor.dim() - 1).requires_grad_();
  };
  const Inputs others{strange(in.x), strange(in.weight),
                      in.bias.detach().repeat({2}).as_strided({6}, {2}).requires_grad_()};
  ASSERT_FALSE(others.x.is_contiguous());
  ASSERT_FALSE(others.weight.is_contiguous());
  expect_agreement(others);
  expect_agreement({in.x.detach().to(torch::MemoryFormat::ChannelsLast), in.weight, in.bias});

  // A gradient that is not contiguous either: sum() expands one number.
  const at::Tensor grad = torch::autograd::grad({conv_relu_pool(in.x, in.weight, in.bias).sum()}, {in.weight})[0];
  const at::Tensor expected = torch::autograd::grad({reference(in.x, in.weight, in.bias).sum()}, {in.weight})[0];
  expect_close(grad, expected, 1000, "gradient of the sum");
}

TEST(ConvReluPool, LeavesOtherTypesToLibTorch) {
  torch::manual_seed(6);
  expect_agreement(random_inputs({7, 3, 8, 9, 6, 3, 2}, torch::kDouble));
  const Inputs in = random_inputs({7, 3, 8, 9, 6, 3, 2}, torch::kBFloat16);
  EXPECT_TRUE(conv_relu_pool(in.x, in.weight, in.bias).equal(reference(in.x, in.weight, in.bias)));
}

TEST(ConvReluPool, IsCastByAutocast) {
  const Autocast bf16(torch::kCPU);
  const auto images = torch::rand({64, 1, 8, 8}), weight = torch::rand({3, 1, 3, 3});
  EXPECT_EQ(conv_relu_pool(images, weight, torch::rand(3)).scalar_type(), torch::kBFloat16);
}

TEST(ConvReluPool, LeavesFewSamplesToLibTorch) {
  torch::manual_seed(12);
  const auto node_of = [](int64_t samples) {  // backward's first node
    const Inputs in = random_inputs({samples, 3, 8, 9, 6, 3, 2});
    return conv_relu_pool(in.x, in.weight, in.bias).grad_fn()->name();
  };
  const int64_t lanes = kernels::of_this_cpu().conv_relu_pool.lanes;
  EXPECT_THAT(node_of(lanes / 3), HasSubstr("AvgPool2D"));
  EXPECT_THAT(node_of(lanes / 3 + 1), HasSubstr("ConvReluPool"));
}

TEST(ConvReluPool, CanBeDifferentiatedTwice) {
  torch::manual_seed(7);
  const Inputs in = random_inputs({6, 3, 8, 9, 6, 3, 2});
  const auto second = [&](const at::Tensor& out) {
    const variable_list first = torch::autograd::grad({out.square().sum()}, {in.x, in.bias}, {}, /*retain_graph=*/true,
                                                      /*create_graph=*/true);
    return torch::autograd::grad({first[0].square().sum() + first[1].square().sum()}, {in.x, in.weight, in.bias});
  };
  const variable_list actual = second(conv_relu_pool(in.x, in.weight, in.bias));
  const variable_list expected = second(reference(in.x, in.weight, in.bias));
  for (size_t i = 0; i < actual.size(); ++i) expect_close(actual[i], expected[i], 1000, "second derivative");
}

TEST(ConvReluPool, GivesNoGradientsWhereNoneAreRecorded) {
  torch::manual_seed(8);
  const Inputs in = random_inputs({20, 3, 8, 9, 6, 3, 2});
  const torch::NoGradGuard no_grad;
  const at::Tensor out = conv_relu_pool(in.x, in.weight, in.bias);
  EXPECT_FALSE(out.requires_grad());
  expect_close(out, reference(in.x, in.weight, in.bias), 18, "out");
}

TEST(ConvReluPool, ChangedInputsAreNoticedInBackward) {
  const Inputs in = random_inputs({8, 2, 6, 6, 3, 3, 3});
  const at::Tensor out = conv_relu_pool(in.x, in.weight, in.bias);
  in.weight.detach().zero_();
  EXPECT_THROW(out.sum().backward(), c10::Error);
}

TEST(ConvReluPool, PassesNanOnAsLibTorchDoes) {
  torch::manual_seed(9);
  const Inputs in = random_inputs({20, 2, 8, 8, 3, 3, 3});
  at::Tensor x = in.x.detach().clone();
  x[3][1][4][4] = std::numeric_limits<float>::quiet_NaN();
  x.requires_grad_();
  const at::Tensor out = conv_relu_pool(x, in.weight, in.bias);
  const at::Tensor expected = reference(x, in.weight, in.bias);
  EXPECT_GT(out.isnan().sum().item<int64_t>(), 0);
  EXPECT_TRUE(out.isnan().equal(expected.isnan()));
  EXPECT_TRUE(out.nan_to_num().allclose(expected.nan_to_num(), 1e-5, 1e-5));
  const at::Tensor grad = torch::autograd::grad({out}, {x}, {torch::ones_like(out)})[0];
  const at::Tensor expected_grad = torch::autograd::grad({expected}, {x}, {torch::ones_like(out)})[0];
  expect_close(grad, expected_grad, 100, "gradient past NaN");
}

// AMX multiplies by 0 what lies beside a window.
TEST(ConvReluPool, KeepsNanInItsSample) {
  torch::manual_seed(13);
  const Inputs in = random_inputs({40, 20, 9, 9, 24, 3, 3});
  const auto others = [](const at::Tensor& of) { return torch::cat({of.narrow(0, 0, 35), of.narrow(0, 36, 4)}); };
  at::Tensor x = in.x.detach().clone();
  x[35][1][4][4] = std::numeric_limits<float>::quiet_NaN();
  const at::Tensor out = conv_relu_pool(x, in.weight, in.bias), expected = reference(x, in.weight, in.bias);
  EXPECT_TRUE(out[35].isnan().logical_or(expected[35].isnan().logical_not()).all().item<bool>());
  expect_close(others(out), others(expected), 180, "other samples");

  const at::Tensor grad = whole_numbers(out.sizes(), torch::kFloat);
  grad[35].fill_(std::numeric_limits<float>::quiet_NaN());
  const auto gradient = [&](const auto& layer) {
    return torch::autograd::grad({layer(in.x, in.weight, in.bias)}, {in.x}, {grad})[0];
  };
  EXPECT_TRUE(gradient(conv_relu_pool)[35].isnan().any().item<bool>());
  expect_close(others(gradient(conv_relu_pool)), others(gradient(reference)), 216, "other samples' gradients");
}

// By AMX an infinite number gives NaN (models/kernels/amx.hpp), and by vectors infinity.
TEST(ConvReluPool, TakesAmxWhereTilesAreFilled) {
  if (!has_amx() || at::get_cpu_capability() != "AVX512") GTEST_SKIP() << "convolutions do not take AMX here";
  const auto by_amx = [](const Sizes& s) {
    const at::Tensor x = torch::full({s.samples, s.channels, s.height, s.width}, INFINITY);
    return conv_relu_pool(x, torch::ones({s.out_channels, s.channels, s.kernel_height, s.kernel_width}), {})
        .isnan()
        .any()
        .item<bool>();
  };
  EXPECT_TRUE(by_amx({16, 20, 13, 13, 50, 5, 5}) && by_amx({16, 20, 13, 13, 25, 5, 5}));
  EXPECT_FALSE(by_amx({16, 18, 13, 13, 50, 5, 5}) || by_amx({16, 21, 13, 13, 50, 5, 5}));
  EXPECT_FALSE(by_amx({16, 20, 13, 13, 34, 5, 5}) || by_amx({16, 20, 13, 13, 20, 3, 3}));
  EXPECT_FALSE(by_amx({16, 20, 64, 64, 50, 5, 5}) || by_amx({16, 512, 4, 4, 512, 3, 3}));
}

// LibTorch fills new memory with NaN then, and so also what the kernels compute in.
TEST(ConvReluPool, ReadsNoMemoryThatWasNotSet) {
  torch::manual_seed(15);
  const struct Deterministic {
    Deterministic() { at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/false); }
    ~Deterministic() { at::globalContext().setDeterministicAlgorithms(false, false); }
  } deterministic;
  expect_agreement(random_inputs({33, 22, 8, 11, 25, 5, 3}));
  expect_agreement(random_inputs({20, 3, 8, 11, 7, 5, 3}));
}

TEST(ConvReluPool, GivesTheSameBitsOnAnyNumberOfThreads) {
  torch::manual_seed(10);
  for (const Sizes& sizes : {Sizes{70, 6, 13, 12, 10, 3, 5}, Sizes{70, 20, 13, 12, 70, 3, 5}}) {
    Inputs in = random_inputs(sizes);
    in.x = torch::randn_like(in.x).requires_grad_();
    const auto run_on = [&](int threads) {
      const IntraOpThreads set(threads);
      const at::Tensor out = conv_relu_pool(in.x, in.weight, in.bias);
      variable_list results = torch::autograd::grad({out}, {in.x, in.weight, in.bias}, {out.detach()});
      results.push_back(out);
      return results;
    };
    const variable_list alone = run_on(1);
    for (const int threads : {3, 7}) {
      const variable_list together = run_on(threads);
      for (size_t i = 0; i < alone.size(); ++i) EXPECT_TRUE(alone[i].equal(together[i])) << sizes << ", " << i;
    }
  }
}

TEST(ConvReluPool, ManyThreadsMayCallAtOnce) {
  torch::manual_seed(11);
  const Inputs in = random_inputs({33, 3, 13, 12, 10, 3, 5});
  const auto weight_grad = [&] {
    // A leaf of the thread's own, as ranks have it: LibTorch notes in a leaf's node that another node precedes it.
    const at::Tensor weight = in.weight.detach().clone().requires_grad_();
    const at::Tensor out = conv_relu_pool(in.x.detach(), weight, in.bias.detach());
    return torch::autograd::grad({out}, {weight}, {out.detach()})[0];
  };
  const at::Tensor expected = weight_grad();
  std::vector<at::Tensor> results(4);
  std::vector<std::thread> threads;
  for (auto& result : results) threads.emplace_back([&] { result = weight_grad(); });
  for (auto& thread : threads) thread.join();
  for (const auto& result : results) EXPECT_TRUE(result.equal(expected));
}

TEST(ConvReluPool, RunsTheKernelsOfTheInstructionsThatAreToBeUsed) {
  const std::string instructions = at::get_cpu_capability();
  const int64_t lanes = instructions == "AVX512" ? 16 : instructions == "AVX2" ? 8 : 4;
  EXPECT_EQ(kernels::of_this_cpu().conv_relu_pool.lanes, lanes) << instructions;
}

TEST(ConvReluPool, ShowsTheShapesThatDoNotFit) {
  const Inputs in = random_inputs({4, 2, 6, 6, 3, 3, 3});
  EXPECT_THAT(error_of([&] { conv_relu_pool(in.x[0], in.weight, in.bias); }), Refused());
  EXPECT_THAT(error_of([&] { conv_relu_pool(in.x, torch::zeros({3, 1, 3, 3}), in.bias); }), Refused());
  EXPECT_THAT(error_of([&] { conv_relu_pool(in.x, in.weight, torch::zeros({4})); }), Refused());
  EXPECT_THAT(error_of([&] { conv_relu_pool(in.x, at::Tensor(), in.bias); }), Refused());
  EXPECT_THAT(error_of([&] { conv_relu_pool(in.x, torch::zeros({3, 2, 6, 3}), in.bias); }), Refused());
}

TEST(ConvReluPoolModule, StartsAsAConv2dAndComputesConvReluPool) {
  torch::manual_seed(12);
  const torch::nn::Conv2d conv(3, 6, 5);
  torch::manual_seed(12);
  ConvReluPool module(3, 6, 5);
  EXPECT_THAT(module->named_parameters().keys(), testing::ElementsAre("weight", "bias"));
  EXPECT_TRUE(module->weight.equal(conv->weight));
  EXPECT_TRUE(module->bias.equal(conv->bias));

  const at::Tensor x = torch::randn({9, 3, 12, 13});
  const at::Tensor out = torch::nn::Sequential(module)->forward(x);
  EXPECT_TRUE(out.equal(conv_relu_pool(x, module->weight, module->bias)));
  out.sum().backward();
  EXPECT_GT(module->bias.grad().abs().min().item<float>(), 0);
}

TEST(ConvReluPoolModule, CloneHasParametersOfItsOwn) {
  ConvReluPool module(2, 4, 3);
  const auto clone = std::dynamic_pointer_cast<ConvReluPoolImpl>(module->clone());
  ASSERT_NE(clone, nullptr);
  EXPECT_TRUE(clone->weight.equal(module->weight));
  EXPECT_TRUE(clone->bias.equal(module->bias));
  EXPECT_FALSE(clone->weight.is_alias_of(module->weight));
  EXPECT_TRUE(clone->weight.is_same(clone->parameters()[0]));
}

TEST(ConvReluPoolModule, RefusesSizesBelowOne) {
  EXPECT_THAT(error_of([] { ConvReluPool(2, 0, 3); }), Refused());
}

}  // namespace conv_relu_pool_test
}  // namespace lockstep
