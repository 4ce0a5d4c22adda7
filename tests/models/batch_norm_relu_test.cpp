// Labels: arithmetic
// batch_norm_relu against LibTorch's operators in float64: forward, backward and twice backward, on the kernels and
// beside them. CMakeLists.txt runs this test once per instruction set that the CPU may have.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "models/batch_norm_relu.hpp"
#include "support/intra_op_threads.hpp"

#include <limits>
#include <vector>

namespace lockstep {
namespace batch_norm_relu_test {

using at::MemoryFormat;
using at::Tensor;
using testing::HasSubstr;
using testing::Not;
using torch::autograd::variable_list;
using torch::nn::BatchNorm2d;
using torch::nn::BatchNormOptions;

Tensor reference(BatchNorm2d& norm, const Tensor& x, const Tensor& shortcut) {
  const Tensor y = norm->forward(x);
  return torch::relu(shortcut.defined() ? y + shortcut : y);
}

BatchNorm2d random_norm(const BatchNormOptions& options) {
  BatchNorm2d norm(options);
  const torch::NoGradGuard no_grad;
  for (const auto& parameter : norm->parameters()) parameter.uniform_(-2, 2);
  if (norm->running_mean.defined()) {
    norm->running_mean.normal_();
    norm->running_var.uniform_(0.5, 2);
  }
  return norm;
}

BatchNorm2d in_float64(const BatchNorm2d& norm) {
  const auto copy = std::dynamic_pointer_cast<torch::nn::BatchNorm2dImpl>(norm->clone());
  copy->to(torch::kDouble);
  return copy;
}

Tensor leaf(const Tensor& values) {
  return values.detach().clone(MemoryFormat::Preserve).requires_grad_();
}
Tensor channels_last(at::IntArrayRef sizes) {
  return torch::randn(sizes).contiguous(MemoryFormat::ChannelsLast);
}

void expect_close(const Tensor& actual, const Tensor& expected, const char* what) {
  ASSERT_EQ(actual.defined(), expected.defined()) << what;
  if (!actual.defined()) return;
  EXPECT_EQ(actual.sizes(), expected.sizes()) << what;
  const double size = std::max(1.0, expected.abs().max().item<double>());
  EXPECT_LE((actual.to(torch::kDouble) - expected).abs().max().item<double>(), 1e-5 * size) << what;
}

struct Results {
  std::vector<Tensor> of_two_forwards;  // y, gradients of x, weight, bias and the short cut; twice
  std::vector<Tensor> buffers;
};

template <class Function>
Results results_of(const Function& function, BatchNorm2d norm, const std::vector<Tensor>& x,
                   const std::vector<Tensor>& shortcut, const std::vector<Tensor>& grad) {
  Results results;
  for (size_t i = 0; i < x.size(); ++i) {
    variable_list inputs{leaf(x[i]), norm->weight, norm->bias};
    if (shortcut[i].defined()) inputs.push_back(leaf(shortcut[i]));
    const Tensor y = function(norm, inputs[0], shortcut[i].defined() ? inputs[3] : Tensor());
    results.of_two_forwards.push_back(y.detach());
    for (const auto& found : torch::autograd::grad({y}, inputs, {grad[i]})) results.of_two_forwards.push_back(found);
  }
  results.buffers = norm->buffers();
  return results;
}

const auto fused = [](BatchNorm2d& norm, const Tensor& x, const Tensor& shortcut) {
  return batch_norm_relu(*norm, x, shortcut);
};

void expect_agreement(at::IntArrayRef sizes, bool adds, MemoryFormat of_grad) {
  SCOPED_TRACE(c10::str(sizes, adds ? " and a short cut" : ""));
  const BatchNorm2d norm = random_norm(BatchNormOptions(sizes[1]).momentum(0.3));
  std::vector<Tensor> x, shortcut, grad, x64, shortcut64, grad64;
  const auto in64 = [](const Tensor& tensor) { return tensor.defined() ? tensor.to(torch::kDouble) : tensor; };
  for (int i = 0; i < 2; ++i) {
    x.push_back(channels_last(sizes) * 3 + 2);
    shortcut.push_back(adds ? channels_last(sizes) : Tensor());
    grad.push_back(torch::randn(sizes).contiguous(of_grad));
    x64.push_back(in64(x[i])), shortcut64.push_back(in64(shortcut[i])), grad64.push_back(in64(grad[i]));
  }
  const Results expected = results_of(reference, in_float64(norm), x64, shortcut64, grad64);
  const Results actual = results_of(fused, norm, x, shortcut, grad);
  ASSERT_EQ(actual.of_two_forwards.size(), expected.of_two_forwards.size());
  for (size_t i = 0; i < actual.of_two_forwards.size(); ++i) {
    SCOPED_TRACE(i);
    expect_close(actual.of_two_forwards[i], expected.of_two_forwards[i], "results");
  }
  for (size_t i = 0; i < actual.buffers.size(); ++i) {
    expect_close(actual.buffers[i], expected.buffers[i].to(torch::kDouble), "running statistics");
  }
}

TEST(BatchNormRelu, IsLibTorchsOperators) {
  torch::manual_seed(1);
  for (const bool adds : {false, true}) {
    for (const auto& sizes : std::vector<std::vector<int64_t>>{{2, 1, 1, 1},
                                                               {1, 1, 3, 5},
                                                               {1, 3, 2, 2},
                                                               {5, 7, 1, 1},
                                                               {3, 8, 4, 5},
                                                               {4, 16, 7, 7},
                                                               {3, 33, 9, 3},
                                                               {2, 64, 14, 14},
                                                               {9, 87, 5, 5},
                                                               {3, 300, 3, 3},
                                                               {2, 5000, 4, 3}}) {
      expect_agreement(sizes, adds, MemoryFormat::ChannelsLast);
    }
    expect_agreement({4, 20, 6, 5}, adds, MemoryFormat::Contiguous);
  }
}

TEST(BatchNormRelu, RunsTheKernelsOnChannelsLastInTraining) {
  const auto node_of = [](BatchNorm2d norm, const Tensor& x, const Tensor& shortcut) {  // backward's first node
    return batch_norm_relu(*norm, x, shortcut).grad_fn()->name();
  };
  const Tensor x = channels_last({2, 6, 3, 3});
  EXPECT_THAT(node_of(random_norm(6), x, {}), HasSubstr("BatchNormRelu"));
  EXPECT_THAT(node_of(random_norm(6), x, x), HasSubstr("BatchNormRelu"));
  const auto by_libtorch = Not(HasSubstr("BatchNormRelu"));
  EXPECT_THAT(node_of(random_norm(6), x.contiguous(), {}), by_libtorch);
  EXPECT_THAT(node_of(random_norm(6), x, x.contiguous()), by_libtorch);
  EXPECT_THAT(node_of(random_norm(6), x, torch::randn({6, 1, 1})), by_libtorch);  // broadcast
  EXPECT_THAT(node_of(in_float64(random_norm(6)), x.to(torch::kDouble), {}), by_libtorch);
  BatchNorm2d in_eval = random_norm(6);
  in_eval->eval();
  EXPECT_THAT(node_of(in_eval, x, {}), by_libtorch);
}

// The kernels are not made for these options.
TEST(BatchNormRelu, IsLibTorchsOperatorsForOtherOptionsToo) {
  torch::manual_seed(2);
  const auto expect_same = [](const BatchNormOptions& options, bool training) {
    BatchNorm2d norm = random_norm(options),
                other(std::dynamic_pointer_cast<torch::nn::BatchNorm2dImpl>(norm->clone()));
    norm->train(training), other->train(training);
    const Tensor x = leaf(channels_last({3, 6, 4, 4})), shortcut = channels_last({3, 6, 4, 4});
    for (int step = 0; step < 2; ++step) {
      const Tensor y = batch_norm_relu(*norm, x, shortcut), expected = reference(other, x, shortcut);
      EXPECT_TRUE(y.equal(expected));
      EXPECT_TRUE(torch::autograd::grad({y}, {x}, {y.detach()})[0].equal(
          torch::autograd::grad({expected}, {x}, {y.detach()})[0]));
    }
    const auto buffers = norm->buffers(), expected = other->buffers();
    for (size_t i = 0; i < buffers.size(); ++i) EXPECT_TRUE(buffers[i].equal(expected[i])) << i;
  };
  expect_same(BatchNormOptions(6), /*training=*/false);
  expect_same(BatchNormOptions(6).momentum(std::nullopt), true);
  expect_same(BatchNormOptions(6).affine(false), true);
  expect_same(BatchNormOptions(6).track_running_stats(false), true);
}

TEST(BatchNormRelu, KeepsTheVarianceOfValuesFarFromZero) {
  torch::manual_seed(3);
  BatchNorm2d norm(8);
  const Tensor x = (1000 + channels_last({4, 8, 32, 32})).contiguous(MemoryFormat::ChannelsLast);
  const Tensor y = batch_norm_relu(*norm, x);
  BatchNorm2d other = in_float64(BatchNorm2d(8));
  EXPECT_TRUE(y.to(torch::kDouble).allclose(reference(other, x.to(torch::kDouble), {}), 0, 3e-4));  // 1e-7 * 1000
  EXPECT_TRUE(norm->running_var.to(torch::kDouble).allclose(other->running_var, 1e-6, 0));
}

TEST(BatchNormRelu, CanBeDifferentiatedTwice) {
  torch::manual_seed(4);
  for (const bool adds : {false, true}) {
    BatchNorm2d norm = random_norm(5);
    const BatchNorm2d other = in_float64(norm);
    const Tensor x = channels_last({3, 5, 4, 4}), shortcut = adds ? channels_last({3, 5, 4, 4}) : Tensor();
    const auto second = [](const auto& function, BatchNorm2d net, const Tensor& x, const Tensor& shortcut) {
      variable_list inputs{leaf(x), net->weight, net->bias};
      if (shortcut.defined()) inputs.push_back(leaf(shortcut));
      const Tensor y = function(net, inputs[0], shortcut.defined() ? inputs[3] : Tensor());
      Tensor sum = torch::zeros({}, x.options());
      for (const auto& grad : torch::autograd::grad({y.pow(3).sum()}, inputs, {}, true, /*create_graph=*/true)) {
        sum = sum + grad.square().sum();
      }
      return torch::autograd::grad({sum}, inputs);
    };
    const variable_list actual = second(fused, norm, x, shortcut);
    const Tensor shortcut64 = adds ? shortcut.to(torch::kDouble) : Tensor();
    const variable_list expected = second(reference, other, x.to(torch::kDouble), shortcut64);
    for (size_t i = 0; i < actual.size(); ++i) expect_close(actual[i], expected[i], "second derivative");
  }
}

TEST(BatchNormRelu, GivesTheSameBitsOnAnyNumberOfThreads) {
  torch::manual_seed(5);
  const BatchNorm2d norm = random_norm(40);
  const std::vector<Tensor> x{channels_last({6, 40, 20, 20})}, shortcut{channels_last({6, 40, 20, 20})},
      grad{channels_last({6, 40, 20, 20})};
  const auto run = [&](int threads, const std::vector<Tensor>& added) {
    const IntraOpThreads set(threads);
    Results results =
        results_of(fused, std::dynamic_pointer_cast<torch::nn::BatchNorm2dImpl>(norm->clone()), x, added, grad);
    for (const auto& buffer : results.buffers) results.of_two_forwards.push_back(buffer);
    return results.of_two_forwards;
  };
  for (const auto& added : {shortcut, std::vector<Tensor>(1)}) {
    const auto alone = run(1, added), together = run(3, added);
    for (size_t i = 0; i < alone.size(); ++i) EXPECT_TRUE(alone[i].equal(together[i])) << i;
  }
}

TEST(BatchNormRelu, PassesNanOnAsLibTorchDoes) {
  torch::manual_seed(6);
  BatchNorm2d norm = random_norm(3);
  for (const bool adds : {false, true}) {
    Tensor x = channels_last({2, 3, 4, 4}), shortcut = adds ? channels_last({2, 3, 4, 4}) : Tensor();
    (adds ? shortcut : x)[1][2][3][0] = std::numeric_limits<float>::quiet_NaN();
    const Tensor y = batch_norm_relu(*norm, leaf(x), shortcut), expected = reference(norm, x, shortcut);
    EXPECT_TRUE(y.isnan().any().item<bool>());
    EXPECT_TRUE(y.isnan().equal(expected.isnan()));
    const Tensor grad = torch::autograd::grad({y}, {norm->weight}, {torch::ones_like(y)})[0];
    const Tensor expected_grad = torch::autograd::grad({expected}, {norm->weight}, {torch::ones_like(y)})[0];
    EXPECT_TRUE(grad.isnan().equal(expected_grad.isnan()));
  }
}

TEST(BatchNormRelu, ChangedResultsAreNoticedInBackward) {
  BatchNorm2d norm(3);
  const Tensor x = leaf(channels_last({2, 3, 4, 4})), y = batch_norm_relu(*norm, x, channels_last({2, 3, 4, 4}));
  y.detach().zero_();
  EXPECT_THROW(y.sum().backward(), c10::Error);
}

TEST(BatchNormRelu, RefusesOneValuePerChannel) {
  BatchNorm2d norm(3);
  const auto compute = [&] { batch_norm_relu(*norm, channels_last({1, 3, 1, 1})); };
  EXPECT_THROW(compute(), c10::Error);
  EXPECT_EQ(norm->running_mean.abs().sum().item<float>(), 0);
}

}  // namespace batch_norm_relu_test
}  // namespace lockstep
