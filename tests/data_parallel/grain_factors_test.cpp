// Labels: concurrency
// By grains, linear layers hand over the factors of their weights' gradients. The sums have the bits of the gradients.
#include <gmock/gmock.h>
#include <torch/torch.h>

#include "data_parallel/grain_sums.hpp"
#include "nn/factors_scope.hpp"
#include "support/factor_training.hpp"
#include "support/idle_check.hpp"
#include "support/intra_op_threads.hpp"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace grain_factors_test {

using namespace lockstep;
using torch::Tensor;
namespace nn = torch::nn;

// ---- A layer of the tests' own.

Tensor product_of(const GradientFactors& factors) {
  return (factors.grad.unsqueeze(2) * factors.x.unsqueeze(0)).sum(1);
}

void sum_in_tree(const std::vector<GradientFactors>& factors, const Tensor& sum) {
  std::vector<Tensor> tree;
  for (const auto& one : factors) tree.push_back(product_of(one));
  for (; tree.size() > 1; tree.resize(tree.size() / 2)) {
    for (size_t i = 0; i < tree.size() / 2; ++i) tree[i] = tree[2 * i] + tree[2 * i + 1];
  }
  sum.copy_(tree[0]);
}

GradientFactors factors_of(const Tensor& grad, const Tensor& x) {
  return {.grad = grad.t().contiguous(), .x = x, .sum_products = sum_in_tree};
}

// x * weight^T.
struct Product : torch::autograd::Function<Product> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x, const Tensor& weight) {
    context->save_for_backward({x, weight});
    return x.mm(weight.t());
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    const GradientFactors factors = factors_of(gradients[0], saved[0]);
    const bool is_taken = FactorsScope::take(saved[1], factors);
    return {gradients[0].mm(saved[1]), is_taken ? Tensor() : product_of(factors)};
  }
};

struct HandingLinearImpl : nn::LinearImpl {
  using nn::LinearImpl::LinearImpl;
  Tensor forward(const Tensor& x) { return Product::apply(x, weight) + bias; }
};
TORCH_MODULE(HandingLinear);

// ---- The sums.

GradientFactors random_factors(int64_t rows, int64_t out, int64_t in) {
  return factors_of(torch::randn({rows, out}), torch::randn({rows, in}));
}

// A layer of 48 units: factors of two grains of 10 samples, of four of 5, and of eight of 2 take less memory than it.
TEST(GrainSumsTest, HaveTheSameBitsWithFactorsAndWithGradients) {
  torch::manual_seed(2);
  constexpr int64_t kUnits = 48;
  const auto view = [](size_t, const Tensor& row) { return row.view({kUnits, kUnits}); };
  for (const int64_t samples : {2, 5, 10}) {
    for (const Range& run : {Range{0, 1}, Range{0, 8}, Range{0, 16}, Range{3, 9}, Range{1, 14}}) {
      for (const int64_t left_out : {-1, 0, 4, 5}) {  // -1: all grains have a gradient
        for (const int64_t dense : {-1, 3, 6}) {      // this one has no factors
          GrainSums with(1, kUnits * kUnits, torch::kFloat, view), without(1, kUnits * kUnits, torch::kFloat, view);
          with.begin(run);
          without.begin(run);
          for (int64_t grain = run.begin; grain < run.end; ++grain) {
            if (grain == left_out) continue;
            const GradientFactors factors = random_factors(samples, kUnits, kUnits);
            ASSERT_TRUE(GrainSums::takes(factors));
            EXPECT_TRUE(grain == dense ? with.add(0, grain, {product_of(factors)})
                                       : with.add(0, grain, {{}, {factors}}));
            EXPECT_TRUE(without.add(0, grain, {product_of(factors)}));
          }
          with.finish();
          without.finish();
          const auto sums = with.rows(), expected = without.rows();
          ASSERT_EQ(sums.size(), expected.size());
          for (size_t row = 0; row < sums.size(); ++row) {
            EXPECT_TRUE(sums[row].equal(expected[row])) << samples << " samples, " << run.begin << " to " << run.end
                                                        << ", without " << left_out << ", dense " << dense;
          }
        }
      }
    }
  }
}

TEST(GrainSumsTest, TakeFactorsOfTwoGrainsThatAreSmallerThanAGradient) {
  const auto factors = [](int64_t rows) {
    return GradientFactors{.grad = torch::zeros({48, rows}), .x = torch::zeros({rows, 48})};
  };
  EXPECT_TRUE(GrainSums::takes(factors(12)));
  EXPECT_FALSE(GrainSums::takes(factors(13)));
}

TEST(GrainSumsTest, KeepNoMoreFactorsThanTheMemoryOfAGradientHolds) {
  const auto kept_of_four_grains = [](int64_t samples) {
    GrainSums sums(1, 48 * 48, torch::kFloat, [](size_t, const Tensor& row) { return row.view({48, 48}); });
    sums.begin({0, 8});
    std::vector<GradientFactors> all;
    for (int64_t grain = 0; grain < 4; ++grain) {
      all.push_back(random_factors(samples, 48, 48));
      EXPECT_TRUE(sums.add(0, grain, {{}, {all.back()}}));
    }
    return std::count_if(all.begin(), all.end(), [](const auto& factors) { return factors.x.use_count() > 1; });
  };
  EXPECT_EQ(kept_of_four_grains(6), 4);
  EXPECT_EQ(kept_of_four_grains(7), 0);
}

// ---- Who hands them over.

class FactorsScopeTest : public testing::Test {
 protected:
  void SetUp() override {
    loss().backward();
    gradient = take_gradient();
  }

  Tensor loss() { return layer(x).square().sum(); }

  Tensor take_gradient() { return std::exchange(layer->weight.mutable_grad(), Tensor()); }

  Tensor gradient_beside(HandedFactors& handed, const Tensor& root) {
    const FactorsScope scope = handed.scope(root);
    root.backward();
    return take_gradient();
  }

  const IntraOpThreads one_{1};
  HandingLinear layer{24, 40};
  const Tensor x = torch::randn({32, 24});
  Tensor gradient;
};

TEST_F(FactorsScopeTest, GetsTheFactorsOfWhatBackwardThenDoesNotCompute) {
  HandedFactors handed{layer->weight}, refuses{layer->weight, /*takes=*/false};
  layer->bias.mutable_grad().reset();
  EXPECT_FALSE(gradient_beside(handed, loss()).defined());
  EXPECT_TRUE(layer->bias.grad().defined());
  ASSERT_EQ(handed.factors.size(), 1);
  EXPECT_TRUE(product_of(handed.factors[0]).equal(gradient));
  const Tensor again = loss();
  {
    const FactorsScope outer = handed.scope(again);
    EXPECT_TRUE(gradient_beside(refuses, loss()).equal(gradient));
    again.backward();
  }
  EXPECT_FALSE(take_gradient().defined());
  EXPECT_EQ(handed.factors.size(), 2);
  loss().backward();
  EXPECT_TRUE(take_gradient().equal(gradient));
}

TEST_F(FactorsScopeTest, LeavesAloneWhatSomebodyElseWantsToSee) {
  HandedFactors handed{layer->weight};
  {
    const Tensor root = loss();
    const FactorsScope scope = handed.scope(root);
    EXPECT_TRUE(torch::autograd::grad({root}, {layer->weight})[0].equal(gradient));
  }
  Tensor seen;
  layer->weight.register_hook([&](const Tensor& grad) { seen = grad.clone(); });
  EXPECT_TRUE(gradient_beside(handed, loss()).equal(gradient));
  EXPECT_TRUE(seen.equal(gradient));
  EXPECT_TRUE(handed.factors.empty());
}

// Their gradients are summed up, in an order that is autograd's.
TEST_F(FactorsScopeTest, LeavesAloneWhatSeveralOperatorsRead) {
  HandedFactors handed{layer->weight};
  EXPECT_TRUE(gradient_beside(handed, loss() + loss()).equal(2 * gradient));
  EXPECT_TRUE(gradient_beside(handed, loss() + layer->weight.sum()).defined());
  EXPECT_TRUE(handed.factors.empty());
}

// ---- Training.

TEST(GrainFactorsTest, ChangeNoBitOnAnyLayout) {
  expect_the_same_bits_on_any_layout<HandingLinear>([] { return std::make_shared<IdleCheck>(); });
}

}  // namespace grain_factors_test
