#include "linear_products.hpp"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/native/CPUBlas.h>
#include <ATen/ops/empty.h>

#include "models/kernels/kernels.hpp"

#include <algorithm>
#include <exception>
#include <memory>

namespace lockstep {
namespace {

// A tile of a weight's gradient stays in the caches while all products are added to it.
constexpr int64_t kTileRows = 64, kTileColumns = 128;

constexpr int64_t kMostRows = 128;  // rows of x, for a weight's gradient

// Sets c = a * b, or adds: c += a * b, where each value of the product is summed up before it is added.
void multiply(int64_t rows, int64_t columns, int64_t depth, const float* a, int64_t row_of_a, const float* b,
              int64_t row_of_b, float* c, int64_t row_of_c, bool adds) {
  at::native::cpublas::brgemm(rows, columns, depth, row_of_a, row_of_b, row_of_c, adds, a, b, c, /*is_vnni=*/false);
}

// Tries oneDNN, which promises no order of additions: adding must round like the sum of two numbers.
bool adds_whole_products(int64_t rows, int64_t columns, int64_t depth) {
  const auto values = [](int64_t count, int64_t step) {
    std::vector<float> made;
    for (int64_t i = 0; i < count; ++i) made.push_back(1.0F / static_cast<float>(step * i + 2 * step + 1));
    return made;
  };
  const std::vector<float> a = values(rows * depth, 1), b = values(depth * columns, 3);
  std::vector<float> product(rows * columns), sum = values(rows * columns, 5), expected = sum;
  multiply(rows, columns, depth, a.data(), depth, b.data(), columns, product.data(), columns, /*adds=*/false);
  multiply(rows, columns, depth, a.data(), depth, b.data(), columns, sum.data(), columns, /*adds=*/true);
  for (size_t i = 0; i < expected.size(); ++i) expected[i] += product[i];
  return sum == expected;
}

bool has_microkernel() {
  static const bool has = [] {
    try {
      return adds_whole_products(48, 48, 48) && adds_whole_products(kTileRows, kTileColumns, kMostRows) &&
             adds_whole_products(6, 44, kMostRows - 1) && adds_whole_products(1, kTileColumns - 1, 33);
    } catch (const std::exception&) {  // this LibTorch, or this CPU, has none
      return false;
    }
  }();
  return has;
}

at::Tensor transposed(const at::Tensor& matrix) {
  const at::Tensor dense = matrix.contiguous();
  const int64_t rows = dense.size(0), columns = dense.size(1);
  at::Tensor result = at::empty({columns, rows}, dense.options());
  kernels::of_this_cpu().matrices.transpose(dense.const_data_ptr<float>(), columns, rows, columns,
                                            result.mutable_data_ptr<float>(), rows);
  return result;
}

// Sums one tile of sum_products(). The tree keeps a sum per level: the first in the tile itself, others in `scratch`.
class TileSum {
 public:
  TileSum(float* tile, int64_t stride, float* scratch, int64_t rows, int64_t columns)
      : tile_(tile), stride_(stride), scratch_(scratch), rows_(rows), columns_(columns) {}

  // Adds product `number`; give the products in their order. A right half is added to the left one at once.
  void add(size_t number, const float* a, int64_t depth, const float* b, int64_t row_of_b) {
    const bool is_right_half = number % 2 == 1;
    if (!is_right_half) ++sums_;
    multiply(rows_, columns_, depth, a, depth, b, row_of_b, sum(sums_ - 1), stride_of(sums_ - 1), is_right_half);
    if (!is_right_half) return;
    for (size_t blocks = (number + 1) / 2; blocks % 2 == 0; blocks /= 2) add_last_two();
  }

 private:
  float* sum(int64_t number) const { return number == 0 ? tile_ : scratch_ + (number - 1) * kTileRows * kTileColumns; }
  int64_t stride_of(int64_t number) const { return number == 0 ? stride_ : columns_; }

  void add_last_two() {
    --sums_;
    kernels::of_this_cpu().matrices.add(sum(sums_), columns_, rows_, columns_, sum(sums_ - 1), stride_of(sums_ - 1));
  }

  float* const tile_;
  const int64_t stride_;
  float* const scratch_;
  const int64_t rows_, columns_;
  int64_t sums_ = 0;
};

}  // namespace

bool has_small_products() {
  return at::get_num_threads() == 1 && has_microkernel() && at::globalContext().userEnabledMkldnn();
}

bool is_small_forward(int64_t rows) {
  return rows >= 16 && rows <= 64;
}

bool is_small_for_x(int64_t rows, const at::Tensor& weight) {
  return rows <= 64 && weight.size(0) <= 1024;
}

bool is_small_for_weight(int64_t rows, const at::Tensor& weight) {
  return rows <= kMostRows && weight.numel() <= 1 << 20;
}

// The transposed product reads the weight along its rows. So x is transposed instead of the weight. The result is
// transposed back tile by tile, while a tile is in the caches.
at::Tensor small_forward(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  const int64_t rows = x.size(0), in = weight.size(1), out = weight.size(0);
  const at::Tensor columns = transposed(x);
  at::Tensor y = at::empty({rows, out}, x.options());
  const float* const biases = bias ? bias->const_data_ptr<float>() : nullptr;
  const std::unique_ptr<float[]> tile(new float[kTileColumns * rows]);
  for (int64_t first = 0; first < out; first += kTileColumns) {
    const int64_t size = std::min(kTileColumns, out - first);
    for (int64_t i = 0; biases && i < size; ++i) std::fill_n(tile.get() + i * rows, rows, biases[first + i]);
    multiply(size, rows, in, weight.const_data_ptr<float>() + first * in, in, columns.const_data_ptr<float>(), rows,
             tile.get(), rows, /*adds=*/biases != nullptr);
    kernels::of_this_cpu().matrices.transpose(tile.get(), rows, size, rows, y.mutable_data_ptr<float>() + first, out);
  }
  return y;
}

at::Tensor small_product_for_x(const at::Tensor& grad, const at::Tensor& weight) {
  const int64_t rows = grad.size(0), in = weight.size(1), out = weight.size(0);
  const at::Tensor dense = grad.contiguous();
  at::Tensor result = at::empty({rows, in}, grad.options());
  multiply(rows, in, out, dense.const_data_ptr<float>(), out, weight.const_data_ptr<float>(), in,
           result.mutable_data_ptr<float>(), in, /*adds=*/false);
  return result;
}

GradientFactors gradient_factors(const at::Tensor& grad, const at::Tensor& x) {
  return {.grad = transposed(grad), .x = x.contiguous(), .sum_products = sum_products};
}

void sum_products(const std::vector<GradientFactors>& factors, const at::Tensor& sum) {
  const int64_t out = sum.size(0), in = sum.size(1);
  int64_t levels = 1;
  while ((size_t{1} << levels) < factors.size()) ++levels;
  const std::unique_ptr<float[]> scratch(new float[levels * kTileRows * kTileColumns]);
  float* const values = sum.mutable_data_ptr<float>();
  for (int64_t row = 0; row < out; row += kTileRows) {
    const int64_t rows = std::min(kTileRows, out - row);
    for (int64_t column = 0; column < in; column += kTileColumns) {
      TileSum tile(values + row * in + column, in, scratch.get(), rows, std::min(kTileColumns, in - column));
      for (size_t number = 0; number < factors.size(); ++number) {
        const auto& [grad, x, sums] = factors[number];
        const int64_t depth = x.size(0);
        tile.add(number, grad.const_data_ptr<float>() + row * depth, depth, x.const_data_ptr<float>() + column, in);
      }
    }
  }
}

}  // namespace lockstep
