// Labels: concurrency
// FastLinear hands over the factors of its weight's gradient. By grains, sums of their products have the bits of sums
// of gradients. Without grains the product goes to a bucket.
#include <ATen/record_function.h>
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/data_parallel/data_parallel.hpp>
#include <lockstep/lab/check_arithmetic.hpp>
#include <lockstep/models/linear.hpp>

#include "devices/micro_kernel.hpp"
#include "models/linear_products.hpp"
#include "nn/factors_scope.hpp"
#include "support/error_of.hpp"
#include "support/factor_training.hpp"
#include "support/intra_op_threads.hpp"
#include "support/test_devices.hpp"

#include <array>
#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace linear_factors_test {

using namespace lockstep;
using torch::Tensor;

Tensor product_of(const GradientFactors& factors) {
  Tensor product = torch::empty({factors.grad.size(0), factors.x.size(1)});
  sum_products({factors}, product);
  return product;
}

TEST(SumOfProductsTest, HasTheBitsOfTheProductsAddedInATree) {
  if (!has_micro_kernel()) GTEST_SKIP() << "LibTorch has no micro-kernel for this CPU";
  torch::manual_seed(1);
  for (const auto& [rows, out, in] : {std::array<int64_t, 3>{32, 64, 128},
                                      {5, 70, 300},
                                      {1, 3, 2},
                                      {33, 129, 127},
                                      {10, 48, 48},
                                      {600, 70, 512},  // these depths are more than a block
                                      {100, 20, 2500},
                                      {1100, 3, 20}}) {
    for (const size_t count : {1, 2, 4, 8, 16}) {
      std::vector<GradientFactors> factors;
      std::vector<Tensor> tree;
      for (size_t i = 0; i < count; ++i) {
        factors.push_back(gradient_factors(torch::randn({out, rows}), torch::randn({rows, in})));
        tree.push_back(product_of(factors.back()));
        const Tensor plain = torch::mm(factors.back().grad, factors.back().x);
        EXPECT_LE((tree.back() - plain).abs().max().item<double>(), 1e-3);
      }
      for (; tree.size() > 1; tree.resize(tree.size() / 2)) {
        for (size_t i = 0; i < tree.size() / 2; ++i) tree[i] = tree[2 * i] + tree[2 * i + 1];
      }
      const Tensor sum = torch::full({out, in}, NAN);
      sum_products(factors, sum);
      EXPECT_TRUE(sum.equal(tree[0])) << count << " of " << rows << ", " << out << ", " << in;
    }
  }
}

// Where a CPU has AMX, the micro-kernel multiplies the grains of few rows.
TEST(SumOfProductsTest, MayHaveFactorsOfFewAndOfManyRows) {
  if (!has_micro_kernel()) GTEST_SKIP() << "LibTorch has no micro-kernel for this CPU";
  torch::manual_seed(2);
  for (const auto& grains : {std::array<int64_t, 4>{16, 128, 128, 128}, {128, 16, 16, 16}}) {
    std::vector<GradientFactors> factors;
    Tensor exact = torch::zeros({300, 700}, torch::kDouble);
    for (const int64_t rows : grains) {
      const Tensor grad = torch::randn({rows, 300}), x = torch::randn({rows, 700});
      factors.push_back(gradient_factors(output_gradient(grad, {}).transposed, x));
      exact += grad.t().to(torch::kDouble).mm(x.to(torch::kDouble));
    }
    const auto pair = [&](size_t first) { return product_of(factors[first]) + product_of(factors[first + 1]); };
    const Tensor tree = pair(0) + pair(2), sum = torch::empty_like(tree);
    EXPECT_LE((tree - exact).abs().max().item<double>(), 1e-6 * exact.abs().max().item<double>());
    for (const int threads : {1, 2, 3}) {
      const IntraOpThreads number(threads);
      sum_products(factors, sum.fill_(NAN));
      EXPECT_TRUE(sum.equal(tree)) << grains[0] << ", " << threads;
    }
  }
}

TEST(LinearFactors, AreHandedOverInsteadOfTheWeightsGradient) {
  const IntraOpThreads one(1);
  if (!has_micro_kernel()) GTEST_SKIP() << "linear layers compute by LibTorch on this CPU";
  FastLinear layer(24, 80);
  const Tensor x = torch::randn({32, 24});
  const auto gradient_beside = [&](HandedFactors& handed) {
    layer->zero_grad();
    const Tensor root = layer(x).square().sum();
    const FactorsScope scope = handed.scope(root);
    root.backward();
    EXPECT_TRUE(layer->bias.grad().defined());
    return layer->weight.grad();
  };
  HandedFactors handed{layer->weight}, refuses{layer->weight, /*takes=*/false};
  const Tensor gradient = gradient_beside(refuses);
  ASSERT_TRUE(gradient.defined());
  EXPECT_FALSE(gradient_beside(handed).defined());
  ASSERT_EQ(handed.factors.size(), 1u);
  EXPECT_TRUE(product_of(handed.factors[0]).equal(gradient));
}

// A net whose weight is read once or twice.
struct Net : torch::nn::Module {
  explicit Net(int times) : times(times) {}
  Tensor forward(const Tensor& x) {
    Tensor y = layer(x);
    for (int i = 1; i < times; ++i) y = y + layer(x);
    return y / times;
  }
  int times;
  FastLinear layer = register_module("layer", FastLinear(24, 80));
};

thread_local int64_t copies = 0;  // how often this thread has copied a tensor of the weight's size

TEST(LinearFactors, TheirProductGoesStraightToTheBucket) {
  if (!has_micro_kernel()) GTEST_SKIP() << "linear layers compute by LibTorch on this CPU";
  const Tensor x = torch::randn({64, 24}), y = torch::randn({64, 80});
  for (const int times : {1, 2}) {
    run(test_devices(2), [&](Rank& rank) {
      DataParallel net(Net(times), rank);
      const Tensor& weight = net->layer->weight;
      const int64_t mine = rank.index() * 32;
      const auto backward = [&](int64_t first, int64_t size) {
        copies = 0;
        net.loss({x.narrow(0, first, size), y.narrow(0, first, size), 64}, torch::nn::functional::mse_loss).backward();
        return weight.grad();
      };
      const Tensor residual = (y - torch::nn::functional::linear(x, weight.detach(), net->layer->bias.detach()));
      const Tensor expected = residual.t().mm(x) * (-2.0 / (64 * 80));
      backward(mine, 32);  // the order is learnt
      net->zero_grad();
      const auto handle = at::addThreadLocalCallback(
          at::RecordFunctionCallback([](const at::RecordFunction& function) -> std::unique_ptr<at::ObserverContext> {
            const bool copy = function.name() == std::string_view("aten::copy_");
            if (copy && function.inputs()[0].toTensor().numel() == 24 * 80) ++copies;
            return nullptr;
          }).needsInputs(true));
      const Tensor kept = backward(mine, 32);
      EXPECT_EQ(copies, times - 1);
      EXPECT_LT((kept - expected).abs().max().item<double>(), 1e-6);
      const Tensor values = kept.clone();
      net->zero_grad();
      EXPECT_TRUE(backward(mine, 32).equal(values));
      EXPECT_NE(weight.grad().data_ptr(), kept.data_ptr());  // who keeps a gradient keeps its memory
      EXPECT_TRUE(kept.equal(values));
      EXPECT_LT((backward(mine, 32) - 2 * values).abs().max().item<double>(), 1e-6);  // adds to what is there
      at::removeCallback(handle);
    });
  }
}

thread_local FastLinear read_again{nullptr};  // CheckpointedFunction computes this layer

// Computes the layer again in backward, as activation checkpointing does.
struct CheckpointedFunction : torch::autograd::Function<CheckpointedFunction> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x) {
    context->save_for_backward({x});
    return read_again(x);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& grads) {
    const torch::AutoGradMode grad(true);
    const Tensor x = context->get_saved_variables()[0].detach().requires_grad_();
    read_again(x).backward(grads[0]);
    return {x.grad()};
  }
};

struct ReadTwice : torch::nn::Module {
  Tensor forward(const Tensor& x) {
    const Tensor h = in(x);
    read_again = layer;
    return layer(h) + CheckpointedFunction::apply(h);
  }
  torch::nn::Linear in = register_module("in", torch::nn::Linear(128, 128));
  FastLinear layer = register_module("layer", FastLinear(128, 128));
};

TEST(LinearFactors, OfAGrainAreNotMixedWithABackwardWithinTheBackward) {
  if (!has_micro_kernel()) GTEST_SKIP() << "linear layers compute by LibTorch on this CPU";
  const Dataset data{torch::randn({32, 128}), torch::randn({32, 128})};
  const std::string error = error_of([&] {
    run(test_devices(1), [&](Rank& rank) {
      DataParallel net(ReadTwice(), rank, {.overlap = false});
      for (const auto& batch : batches(data, {.size = 32, .grain = 16}, rank)) {
        net.loss(batch, torch::nn::functional::mse_loss).backward();
      }
    });
  });
  EXPECT_THAT(error, testing::HasSubstr("layer.weight"));
}

TEST(LinearFactors, ChangeNoBitOnAnyLayout) {
  expect_the_same_bits_on_any_layout<FastLinear>([] { return check_arithmetic(1); });
}

}  // namespace linear_factors_test
