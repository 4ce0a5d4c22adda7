// Labels: arithmetic
// fast_linear and FastLinear compute what LibTorch's linear computes, with all gradients, whatever kernels they take.
#include <ATen/Parallel.h>
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/models/fuse_layers.hpp>
#include <lockstep/models/linear.hpp>
#include <lockstep/models/models.hpp>

#include "devices/micro_kernel.hpp"
#include "models/linear_products.hpp"
#include "support/intra_op_threads.hpp"

#include <array>
#include <cmath>
#include <functional>
#include <string>
#include <thread>
#include <vector>

namespace linear_test {

using namespace lockstep;
using torch::Tensor;
namespace nn = torch::nn;

using Computed = std::vector<Tensor>;  // the result, and the gradients of x, weight and bias

Computed with_gradients(const auto& linear, const Tensor& x, const Tensor& weight, const Tensor& bias) {
  std::vector<Tensor> inputs;
  for (const auto& tensor : {x, weight, bias}) {
    if (tensor.defined()) inputs.push_back(tensor.detach().requires_grad_());
  }
  const Tensor y = linear(inputs[0], inputs[1], bias.defined() ? inputs[2] : Tensor());
  Computed all = torch::autograd::grad({y.sin().sum()}, inputs);
  all.push_back(y.detach());
  return all;
}

void expect_alike(const Computed& one, const Computed& other) {
  ASSERT_EQ(one.size(), other.size());
  for (size_t i = 0; i < one.size(); ++i) {
    EXPECT_EQ(one[i].sizes(), other[i].sizes()) << i;
    EXPECT_LE((one[i] - other[i]).abs().max().item<double>(), 1e-5 * other[i].abs().max().item<double>()) << i;
  }
}

void expect_what_libtorch_computes() {
  torch::manual_seed(1);
  const auto fast = [](const auto&... tensors) { return fast_linear(tensors...); };
  const auto plain = [](const auto&... tensors) { return torch::linear(tensors...); };
  const Tensor weight = torch::randn({120, 24}), bias = torch::randn({120});
  const std::vector<Tensor> inputs = {torch::randn({48, 24}),
                                      torch::randn({1, 24}),
                                      torch::randn({6, 8, 24}),
                                      torch::randn({24}),
                                      torch::randn({24, 48}).t(),
                                      torch::randn({8, 6, 24}).transpose(0, 1),
                                      torch::randn({40, 7, 24}).select(1, 6),
                                      torch::randn({80}).unfold(0, 24, 1)};
  for (const auto& x : inputs) {
    SCOPED_TRACE(c10::str(x.sizes()));
    expect_alike(with_gradients(fast, x, weight, bias), with_gradients(plain, x, weight, bias));
    expect_alike(with_gradients(fast, x, weight, {}), with_gradients(plain, x, weight, {}));
    expect_alike(with_gradients(fast, x, weight.t().contiguous().t(), bias), with_gradients(plain, x, weight, bias));
  }
  for (const auto& other : {torch::randn({120, 2}).select(1, 0), torch::randn({1}).expand({120})})
    expect_alike(with_gradients(fast, inputs[0], weight, other), with_gradients(plain, inputs[0], weight, other));
  const Tensor columns = torch::randn({120, 30}).narrow(1, 3, 24);
  expect_alike(with_gradients(fast, inputs[0], columns, bias), with_gradients(plain, inputs[0], columns, bias));
  EXPECT_EQ(fast_linear(torch::empty({0, 24}), weight, bias).sizes(), at::IntArrayRef({0, 120}));
  EXPECT_EQ(fast_linear(torch::ones({2, 24}, torch::kDouble), weight.to(torch::kDouble)).scalar_type(), torch::kDouble);
}

TEST(FastLinear, ComputesWhatLibTorchComputes) {
  expect_what_libtorch_computes();
}

class FastLinearOnOneThread : public testing::Test {
  const IntraOpThreads one_{1};
};

TEST_F(FastLinearOnOneThread, ComputesWhatLibTorchComputes) {
  expect_what_libtorch_computes();
}

// Where LibTorch's products, the micro-kernel's and AMX's meet, and where x is transposed and where the weight is.
TEST_F(FastLinearOnOneThread, ComputesWhatLibTorchComputesOfFewAndOfManyRows) {
  torch::manual_seed(6);
  const auto fast = [](const auto&... tensors) { return fast_linear(tensors...); };
  const auto plain = [](const auto&... tensors) { return torch::linear(tensors...); };
  const Tensor weight = torch::randn({150, 200}), bias = torch::randn({150});
  for (const int64_t rows : {1, 15, 16, 63, 64, 65, 128, 129, 300}) {
    SCOPED_TRACE(rows);
    const Tensor x = torch::randn({rows, 200});
    expect_alike(with_gradients(fast, x, weight, bias), with_gradients(plain, x, weight, bias));
  }
}

// Layers of these sizes take the micro-kernel on some CPUs alone, so the products are called. They have several blocks.
TEST(LinearProducts, OfManyFeaturesAreWhatLibTorchComputes) {
  if (!has_micro_kernel()) GTEST_SKIP() << "LibTorch has no micro-kernel for this CPU";
  torch::manual_seed(9);
  const auto exact = [](const Tensor& a, const Tensor& b) {
    return a.to(torch::kDouble).mm(b.to(torch::kDouble)).to(torch::kFloat);
  };
  // Weights are smaller than x and the result together, or larger.
  for (const auto& [rows, in, out] : {std::array<int64_t, 3>{20, 2500, 130}, {2000, 130, 2500}, {17, 40000, 16}}) {
    SCOPED_TRACE(c10::str(rows, " x ", in, " -> ", out));
    const Tensor x = torch::randn({rows, in}), weight = torch::randn({out, in}), grad = torch::randn({rows, out});
    const Tensor sum = torch::empty({out, in});
    sum_products({gradient_factors(grad.t().contiguous(), x)}, sum);
    expect_alike({linear_product(x, weight, {}, /*relu=*/false), product_for_x(grad, weight), sum},
                 {exact(x, weight.t()), exact(grad, weight), exact(grad.t(), x)});
  }
}

// By AMX a value's bits depend on one row and one column alone, and zeros behind these change none. The micro-kernel
// gives other bits.
TEST(LinearProducts, TakeAmxFrom64RowsOn) {
  if (!has_micro_kernel() || !has_amx()) GTEST_SKIP() << "linear layers do not take AMX on this CPU";
  torch::manual_seed(10);
  const Tensor x = torch::randn({128, 512}), weight = torch::randn({512, 512}), other = torch::randn({512, 512});
  const Tensor y = linear_product(x, weight, {}, /*relu=*/false), for_x = product_for_x(x, other);
  const auto for_weight = [](const Tensor& both) {
    const Tensor sum = torch::empty({512, 512});
    sum_products({gradient_factors(output_gradient(both, {}).transposed, both)}, sum);
    return sum;
  };
  for (const int64_t rows : {16, 63, 64, 127}) {
    const Tensor few = x.narrow(0, 0, rows);
    EXPECT_EQ(linear_product(few, weight, {}, /*relu=*/false).equal(y.narrow(0, 0, rows)), rows >= 64) << rows;
    EXPECT_EQ(product_for_x(few, other).equal(for_x.narrow(0, 0, rows)), rows >= 64) << rows;
    const Tensor with_zeros = torch::cat({few, torch::zeros({128 - rows, 512})});
    EXPECT_EQ(for_weight(few).equal(for_weight(with_zeros)), rows >= 64) << rows;
  }
}

// Otherwise the other tests would compare LibTorch with itself.
TEST(FastLinear, TakesTheMicroKernelUntilOneDnnIsTurnedOff) {
  const auto is_own = [](int64_t rows, int64_t in, int64_t out) {
    const Tensor x = torch::ones({rows, in}, torch::requires_grad());
    return fast_linear(x, torch::ones({out, in})).grad_fn()->name().find("CpuLinear") != std::string::npos;
  };
  EXPECT_EQ(is_own(48, 24, 120), has_micro_kernel());
  EXPECT_EQ(is_own(4096, 1024, 16), has_micro_kernel());
  const bool takes_large_layers = most_micro_kernel_features() > 1024;
  EXPECT_EQ(is_own(4097, 24, 16), takes_large_layers);
  EXPECT_EQ(is_own(48, 1025, 16), takes_large_layers);
  EXPECT_EQ(is_own(48, 16, 1025), takes_large_layers);
  EXPECT_EQ(is_own(16, 262144, 1), takes_large_layers);
  EXPECT_FALSE(is_own(16, 262145, 1));
  at::globalContext().setUserEnabledMkldnn(false);
  EXPECT_FALSE(is_own(48, 24, 120));
  at::globalContext().setUserEnabledMkldnn(true);
}

// NaN is no negative number: a ReLU lets it pass.
TEST(LinearRelu, ComputesWhatLibTorchComputes) {
  torch::manual_seed(8);
  const auto fast = [](const auto&... tensors) { return linear_relu(tensors...); };
  const auto plain = [](const auto&... tensors) { return torch::relu(torch::linear(tensors...)); };
  const Tensor weight = torch::randn({150, 200}), bias = torch::randn({150});
  for (const int64_t rows : {1, 16, 64, 130, 300}) {
    SCOPED_TRACE(rows);
    const Tensor x = torch::randn({rows, 200});
    expect_alike(with_gradients(fast, x, weight, bias), with_gradients(plain, x, weight, bias));
    x[0][0] = NAN;
    EXPECT_TRUE(linear_relu(x, weight, bias)[0].isnan().all().item<bool>());
  }
}

TEST(FastLinear, RefusesWhatDoesNotFitWithLibTorchsWords) {
  const auto words = [](const std::function<void()>& call) -> std::string {
    try {
      call();
    } catch (const c10::Error& error) {
      return error.what_without_backtrace();
    }
    return "no error";
  };
  const auto expect_same_words = [&](const Tensor& x, const Tensor& weight, const Tensor& bias) {
    const std::string wanted = words([&] { torch::linear(x, weight, bias); });
    EXPECT_NE(wanted, "no error");
    EXPECT_EQ(words([&] { fast_linear(x, weight, bias); }), wanted);
  };
  expect_same_words(torch::ones({8, 5}), torch::ones({6, 4}), {});
  expect_same_words(torch::ones({2, 8, 5}), torch::ones({6, 4}), torch::ones({6}));
  expect_same_words(torch::ones({8, 4}), torch::ones({6, 4}), torch::ones({5}));
  expect_same_words(torch::ones({8, 4}), torch::ones({6, 4}, torch::kDouble), {});
}

// A rank's bits must depend on nothing that other ranks compute at the same time.
TEST(FastLinear, ComputesTheSameBitsOnSeveralThreadsAtOnce) {
  torch::manual_seed(3);
  struct Layer {
    Tensor x, weight, bias;
  };
  std::vector<Layer> layers;
  for (const int64_t rows : {1, 16, 48, 64}) {
    for (const int64_t out : {22, 64}) {
      layers.push_back({torch::randn({rows, 96}), torch::randn({out, 96}), torch::randn({out})});
    }
  }
  const auto compute = [](const Layer& layer) {
    return with_gradients([](const auto&... tensors) { return fast_linear(tensors...); }, layer.x, layer.weight,
                          layer.bias);
  };
  const IntraOpThreads one(1);
  std::vector<Computed> alone;
  for (const auto& layer : layers) alone.push_back(compute(layer));
  std::vector<std::string> differ(4);
  std::vector<std::thread> threads;
  for (size_t thread = 0; thread < differ.size(); ++thread) {
    threads.emplace_back([&, thread] {
      at::set_num_threads(1);
      for (size_t turn = 0; turn < 10 * layers.size(); ++turn) {
        const size_t number = (turn + thread) % layers.size();
        const Computed now = compute(layers[number]);
        for (size_t i = 0; i < now.size(); ++i) {
          if (!now[i].equal(alone[number][i])) differ[thread] += c10::str(" ", number, ".", i);
        }
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_THAT(differ, testing::Each(""));
}

TEST(FastLinear, ComputesTheSameWithSeveralIntraOpThreads) {
  torch::manual_seed(4);
  const Tensor weight = torch::randn({512, 512}), bias = torch::randn({512});
  const auto fast = [](const auto&... tensors) { return fast_linear(tensors...); };
  for (const int64_t rows : {48, 128}) {
    SCOPED_TRACE(rows);
    const Tensor x = torch::randn({rows, 512});
    const auto compute = [&](int threads) {
      const IntraOpThreads number(threads);
      return with_gradients(fast, x, weight, bias);
    };
    const Computed one = compute(1), two = compute(2);
    expect_alike(two, one);
    for (size_t i = 0; has_micro_kernel() && i < one.size(); ++i) EXPECT_TRUE(two[i].equal(one[i])) << i;
  }
}

TEST_F(FastLinearOnOneThread, HasASecondDerivative) {
  torch::manual_seed(2);
  const Tensor weight = torch::randn({40, 24}), start = torch::randn({40, 24});
  const auto second = [&](const auto& linear) {
    const Tensor x = start.detach().requires_grad_(), w = weight.detach().requires_grad_();
    const Tensor first = torch::autograd::grad({linear(x, w).sin().sum()}, {x}, {}, {}, /*create_graph=*/true)[0];
    return torch::autograd::grad({first.square().sum()}, {x, w});
  };
  expect_alike(second([](auto& x, auto& w) { return fast_linear(x, w); }),
               second([](auto& x, auto& w) { return torch::linear(x, w); }));
  const Tensor bias = torch::randn({40});
  expect_alike(second([&](auto& x, auto& w) { return linear_relu(x, w, bias); }),
               second([&](auto& x, auto& w) { return torch::relu(torch::linear(x, w, bias)); }));
}

TEST(FastLinear, AsALayerIsCloned) {
  Mlp net(MlpOptions{.hidden = {16}});
  const Tensor x = torch::randn({8, 28 * 28});
  const auto copy = std::dynamic_pointer_cast<nn::SequentialImpl>(net->clone());
  ASSERT_TRUE(copy);
  EXPECT_TRUE(copy->forward(x).equal(net->forward(x)));
  copy->parameters()[0].data().zero_();
  EXPECT_FALSE(copy->forward(x).equal(net->forward(x)));
}

}  // namespace linear_test
