// Labels: concurrency
// By grains, linear layers hand over the factors of their weights' gradients. The sums have the bits of the gradients.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/data_parallel/data_parallel.hpp>
#include <lockstep/data_parallel/optimizer.hpp>
#include <lockstep/lab/check_arithmetic.hpp>
#include <lockstep/models/linear.hpp>

#include "data_parallel/grain_sums.hpp"
#include "data_parallel/loss_part.hpp"
#include "models/linear_products.hpp"
#include "nn/factors_scope.hpp"
#include "support/intra_op_threads.hpp"
#include "support/tensor_bits.hpp"
#include "support/test_devices.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

namespace grain_factors_test {

using namespace lockstep;
using torch::Tensor;
namespace F = torch::nn::functional;
namespace nn = torch::nn;

bool has_products() {
  const IntraOpThreads one(1);  // products need it
  return has_small_products();
}

// ---- The sums.

GradientFactors random_factors(int64_t rows, int64_t out, int64_t in) {
  return gradient_factors(torch::randn({rows, out}), torch::randn({rows, in}));
}

Tensor product_of(const GradientFactors& factors) {
  Tensor product = torch::empty({factors.grad.size(0), factors.x.size(1)});
  sum_products({factors}, product);
  return product;
}

TEST(SumOfProductsTest, HasTheBitsOfTheProductsAddedInATree) {
  if (!has_products()) GTEST_SKIP() << "LibTorch has no micro-kernel for this CPU";
  torch::manual_seed(1);
  for (const auto& [rows, out, in] : {std::array<int64_t, 3>{32, 64, 128}, {5, 70, 300}, {1, 3, 2}, {33, 129, 127}}) {
    for (const size_t count : {1, 2, 4, 8, 16}) {
      std::vector<GradientFactors> factors;
      std::vector<Tensor> tree;
      for (size_t i = 0; i < count; ++i) {
        factors.push_back(random_factors(rows, out, in));
        tree.push_back(product_of(factors.back()));
        const Tensor plain = torch::mm(factors.back().grad, factors.back().x);
        EXPECT_LE((tree.back() - plain).abs().max().item<double>(), 1e-4);
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

// A layer of 48 units: factors of two grains of 10 samples, of four of 5, and of eight of 2 take less memory than it.
TEST(GrainSumsTest, HaveTheSameBitsWithFactorsAndWithGradients) {
  if (!has_products()) GTEST_SKIP() << "LibTorch has no micro-kernel for this CPU";
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
  if (!has_products()) GTEST_SKIP() << "LibTorch has no micro-kernel for this CPU";
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

struct Handed {
  const Tensor weight;
  const bool takes = true;
  std::vector<GradientFactors> factors = {};

  FactorsScope scope(const Tensor& root) {
    return FactorsScope(root, [this](const Tensor& parameter, const GradientFactors& here) {
      if (takes && parameter.is_same(weight)) factors.push_back(here);
      return takes && parameter.is_same(weight);
    });
  }
};

class FactorsScopeTest : public testing::Test {
 protected:
  void SetUp() override {
    if (layer(x).grad_fn()->name().find("OneDnnLinear") == std::string::npos) {
      GTEST_SKIP() << "linear layers compute by LibTorch on this CPU";
    }
    loss().backward();
    gradient = take_gradient();
  }

  Tensor loss() { return layer(x).square().sum(); }

  Tensor take_gradient() { return std::exchange(layer->weight.mutable_grad(), Tensor()); }

  Tensor gradient_beside(Handed& handed, const Tensor& root) {
    const FactorsScope scope = handed.scope(root);
    root.backward();
    return take_gradient();
  }

  const IntraOpThreads one_{1};
  FastLinear layer{24, 40};
  const Tensor x = torch::randn({32, 24});
  Tensor gradient;
};

TEST_F(FactorsScopeTest, GetsTheFactorsOfWhatBackwardThenDoesNotCompute) {
  Handed handed{layer->weight}, refuses{layer->weight, /*takes=*/false};
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
  Handed handed{layer->weight};
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
  Handed handed{layer->weight};
  EXPECT_TRUE(gradient_beside(handed, loss() + loss()).equal(2 * gradient));
  EXPECT_TRUE(gradient_beside(handed, loss() + layer->weight.sum()).defined());
  EXPECT_TRUE(handed.factors.empty());
}

// ---- Training.

// Writes each result to the same memory, which is right as long as a forward follows the backward before.
struct SameMemoryImpl : nn::Module {
  Tensor forward(const Tensor& x) {
    if (!memory.defined() || memory.sizes() != x.sizes()) memory = torch::empty_like(x);
    memory = memory.detach();
    return memory.copy_(x);
  }
  Tensor memory;
};
TORCH_MODULE(SameMemory);

struct NetImpl : nn::Module {
  NetImpl() {
    in = register_module("in", FastLinear(40, 72));
    shared = register_module("shared", FastLinear(72, 72));
    rare = register_module("rare", FastLinear(72, 72));
    single = register_module("single", FastLinear(72, 72));
    out = register_module("out", FastLinear(72, 3));
    same_memory = register_module("same_memory", SameMemory());
  }
  Tensor forward(const Tensor& x) {
    Tensor h = torch::relu(in(x));
    for (int i = 0; i < 3; ++i) h = torch::tanh(shared(h));
    if (x[0][0].item<float>() > 0) h = h + rare(h);
    return out(torch::tanh(single(same_memory(h))));
  }
  FastLinear in{nullptr}, shared{nullptr}, rare{nullptr}, single{nullptr}, out{nullptr};
  SameMemory same_memory{nullptr};
};
TORCH_MODULE(Net);

struct Layout {
  int ranks = 1;
  Sharded sharded = Sharded::nothing;
  bool overlap = true;
  int64_t bucket_bytes = 4 << 20;
  double check_arithmetic = 0;
  bool has_hooks = false;  // which see the gradients, so that there must be some
};

// The weights after two epochs of batches of 43 samples in grains of 5, the last of 3.
TensorBits train(const Layout& layout) {
  torch::manual_seed(4);
  const Dataset data{torch::randn({100, 40}), torch::randint(3, {100}, torch::kLong)};
  TensorBits bits;
  run(test_devices(layout.ranks), [&](Rank& rank) {
    Net module = rank.in_turn([] { return torch::manual_seed(5), Net(); });
    module->to(rank.device());
    if (layout.has_hooks) {
      for (const auto& parameter : module->parameters()) parameter.register_hook([](const Tensor&) {});
    }
    DataParallel net(
        module, rank,
        {.bucket_bytes = layout.bucket_bytes,
         .first_bucket_bytes = layout.bucket_bytes,
         .overlap = layout.overlap,
         .sharded = layout.sharded,
         .grain_check = layout.check_arithmetic > 0 ? check_arithmetic(layout.check_arithmetic) : nullptr});
    Optimizer sgd(net, torch::optim::SGDOptions(0.1));
    for (int epoch = 0; epoch < 2; ++epoch) {
      const BatchOptions options{.size = 43, .seed = 6, .epoch = epoch, .grain = 5};
      for (const auto& batch : batches(data.to(rank.device()), options, rank)) {
        sgd.zero_grad();
        late_loss_of(net.replica(), batch, [&](const Batch& grain) {
          return F::cross_entropy(net(grain.x), grain.y);
        }).backward();
        sgd.step();
      }
    }
    if (rank.index() == 0) bits = tensor_bits(*module);
  });
  return bits;
}

TEST(GrainFactorsTest, ChangeNoBitOnAnyLayout) {
  const TensorBits gradients = train({.has_hooks = true});
  for (const int ranks : {1, 2, 3, 5}) EXPECT_EQ(train({.ranks = ranks}), gradients) << ranks;
  EXPECT_EQ(train({.ranks = 3, .has_hooks = true}), gradients);
  EXPECT_EQ(train({.ranks = 1, .overlap = false}), gradients);
  EXPECT_EQ(train({.ranks = 2, .overlap = false}), gradients);
  EXPECT_EQ(train({.ranks = 3, .bucket_bytes = 1}), gradients);
  EXPECT_EQ(train({.ranks = 2, .check_arithmetic = 1}), gradients);
  EXPECT_EQ(train({.ranks = 3, .sharded = Sharded::state}), gradients);
  EXPECT_EQ(train({.ranks = 3, .sharded = Sharded::gradients}), gradients);
}

}  // namespace grain_factors_test
