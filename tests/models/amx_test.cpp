// Products of float32 by AMX are as near to the exact ones as LibTorch's, wherever their factors lie. A value's bits
// depend on one row and one column alone.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "devices/micro_kernel.hpp"
#include "models/kernels/kernels.hpp"

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>

namespace amx_test {

using namespace lockstep;
using kernels::Factor;
using torch::Tensor;

// A factor [rows, columns] lies within a larger matrix, row by row or column by column.
Factor factor_of(const Tensor& matrix) {
  const bool is_transposed = matrix.stride(1) != 1;
  return {matrix.const_data_ptr<float>(), matrix.stride(is_transposed ? 1 : 0), is_transposed};
}

Tensor random(int64_t rows, int64_t columns, bool is_transposed) {
  return is_transposed ? torch::randn({columns + 1, rows + 2}).t().narrow(0, 1, rows).narrow(1, 1, columns)
                       : torch::randn({rows + 1, columns + 2}).narrow(0, 1, rows).narrow(1, 1, columns);
}

Tensor product(const Tensor& a, const Tensor& b, const Tensor& before = {}) {
  const kernels::AmxKernels& amx = *kernels::of_this_cpu().amx;
  const int64_t rows = a.size(0), columns = b.size(1);
  const Tensor scratch = torch::empty({amx.scratch(rows, columns, a.size(1))}),
               wide = torch::full({rows, columns + 3}, -7.0);
  const Tensor c = wide.narrow(1, 2, columns);
  if (before.defined()) c.copy_(before);
  amx.multiply(rows, columns, a.size(1), factor_of(a), factor_of(b), c.mutable_data_ptr<float>(), columns + 3,
               before.defined(), scratch.mutable_data_ptr<float>());
  EXPECT_TRUE(wide.narrow(1, 0, 2).eq(-7).all().item<bool>() &&
              wide.narrow(1, columns + 2, 1).eq(-7).all().item<bool>());
  return c;
}

class Amx : public testing::Test {
  void SetUp() override {
    if (!has_amx()) GTEST_SKIP() << "this CPU has no AMX";
    torch::manual_seed(1);
  }
};

// An error counts beside the sum of the products' sizes, of which float32 rounds off 6e-8.
TEST_F(Amx, ProductsAreAsExactAsLibTorchs) {
  for (const auto& [rows, depth, columns] : {std::array<int64_t, 3>{128, 512, 512},
                                             {1, 1, 1},
                                             {32, 32, 32},
                                             {33, 129, 31},
                                             {16, 700, 50},
                                             {600, 40, 520},
                                             {40, 3000, 70},
                                             {3, 40000, 5}}) {
    for (const int layout : {0, 1, 2, 3}) {
      SCOPED_TRACE(c10::str(rows, " x ", depth, " x ", columns, ", layout ", layout));
      Tensor a = random(rows, depth, layout / 2 == 1), b = random(depth, columns, layout % 2 == 1);
      if (depth > 1000) a.abs_(), b.abs_();  // the errors of a long sum of positive numbers do not cancel
      const Tensor wide_a = a.to(torch::kDouble), wide_b = b.to(torch::kDouble);
      const Tensor exact = wide_a.mm(wide_b), sizes = wide_a.abs().mm(wide_b.abs());
      const auto error = [&](const Tensor& c) { return (c.to(torch::kDouble) - exact).abs().div(sizes); };
      EXPECT_LE(error(product(a, b)).max().item<double>(), 1e-6);
      EXPECT_LE(error(product(a, b)).mean().item<double>(), 1.5 * error(a.mm(b)).mean().item<double>() + 1e-8);
      const Tensor before = torch::randn({rows, columns});
      EXPECT_LE((product(a, b, before) - before - exact).abs().div(sizes + 1).max().item<double>(), 1e-6);
    }
  }
}

TEST_F(Amx, BitsOfAValueDependOnItsRowAndItsColumnAlone) {
  const Tensor a = random(100, 2500, false), b = random(2500, 90, true), whole = product(a, b);
  EXPECT_TRUE(product(a.narrow(0, 37, 40), b).equal(whole.narrow(0, 37, 40)));
  EXPECT_TRUE(product(a, b.narrow(1, 5, 17)).equal(whole.narrow(1, 5, 17)));
  EXPECT_TRUE(product(a.t().contiguous().t(), b.contiguous()).equal(whole));
  const auto part = [&](int64_t begin, int64_t end, const Tensor& before) {
    return product(a.narrow(1, begin, end - begin), b.narrow(0, begin, end - begin), before);
  };
  const int64_t sum = kernels::kAmxSum;
  EXPECT_TRUE(part(160, sum, part(0, 160, {})).equal(part(0, sum, {})));
  EXPECT_TRUE((part(0, sum, {}) + part(sum, 2 * sum, {}) + part(2 * sum, 2500, {})).equal(whole));
}

TEST_F(Amx, LargeSmallAndInfiniteFactorsGiveWhatTheHeaderSays) {
  const auto of = [](float left, float right) {
    return product(torch::full({1, 1}, left), torch::full({1, 1}, right)).item<float>();
  };
  EXPECT_EQ(of(3.39e38F, 1), 3.39e38F);
  EXPECT_EQ(of(3.39e38F, 4), INFINITY);
  EXPECT_TRUE(std::isnan(of(3.4e38F, 1)));  // bfloat16 rounds it up to infinity
  EXPECT_EQ(of(1.00000012e-30F, 1), 1.00000012e-30F);
  EXPECT_EQ(of(1.00000012e-15F, 1e-15F), 1.00000012e-15F * 1e-15F);
  EXPECT_NEAR(of(1.00000012e-36F, 1) * 1e36F, 1, 1e-2);
  const auto all_ones = std::bit_cast<float>(~uint32_t{0});  // a NaN that addition to its bits makes 0
  EXPECT_TRUE(std::isnan(of(NAN, 1)) && std::isnan(of(1, -NAN)) && std::isnan(of(all_ones, 1)));
  EXPECT_TRUE(std::isnan(of(INFINITY, 1)));
}

}  // namespace amx_test
