#include "linear_products.hpp"

#include <ATen/ops/empty.h>

#include "devices/micro_kernel.hpp"
#include "intra_op.hpp"
#include "models/kernels/kernels.hpp"

#include <algorithm>
#include <memory>

namespace lockstep {
namespace {

// A tile of a product stays in the second-level cache, and so do the columns that it reads.
constexpr int64_t kTileRows = 64, kTileColumns = 128;

// Numbers the tiles of a matrix column by column: neighbours read the same columns of the second factor.
struct Tiles {
  int64_t rows, columns;

  int64_t down() const { return (rows + kTileRows - 1) / kTileRows; }
  int64_t count() const { return down() * ((columns + kTileColumns - 1) / kTileColumns); }
};

struct Tile {
  Tile(const Tiles& of, int64_t number)
      : row(number % of.down() * kTileRows),
        column(number / of.down() * kTileColumns),
        rows(std::min(kTileRows, of.rows - row)),
        columns(std::min(kTileColumns, of.columns - column)) {}

  const int64_t row, column, rows, columns;
};

// Gives a tile's columns of a product's second factor, [depth, columns]. Columns that several tiles read are copied, so
// that rows lie one after the other. Rows of 4 kB and the like fall into the same places of a cache.
class Panel {
 public:
  Panel(const Tiles& of, const float* factor, int64_t row, int64_t depth)
      : is_copied_(of.down() >= 4), factor_(factor), row_(row), depth_(depth) {}

  const float* of(const Tile& tile) {
    if (!is_copied_) return factor_ + tile.column;
    if (!copy_) copy_.reset(new float[depth_ * kTileColumns]);
    for (int64_t i = 0; column_ != tile.column && i < depth_; ++i) {
      std::copy_n(factor_ + i * row_ + tile.column, tile.columns, copy_.get() + i * tile.columns);
    }
    column_ = tile.column;
    return copy_.get();
  }
  int64_t row(const Tile& tile) const { return is_copied_ ? tile.columns : row_; }

 private:
  const bool is_copied_;
  const float* const factor_;
  const int64_t row_, depth_;
  std::unique_ptr<float[]> copy_;
  int64_t column_ = -1;  // the copy's
};

// Calls body(tile) for all tiles, on all intra-op threads.
void for_each_tile(const Tiles& tiles, const auto& body) {
  in_parallel(tiles.count(), [&](int64_t begin, int64_t end) {
    for (int64_t number = begin; number < end; ++number) body(Tile(tiles, number));
  });
}

// Calls body(tile, panel) for all tiles of a product with the second factor [depth, row].
void for_each_tile(const Tiles& tiles, const float* factor, int64_t row, int64_t depth, const auto& body) {
  in_parallel(tiles.count(), [&](int64_t begin, int64_t end) {
    Panel panel(tiles, factor, row, depth);
    for (int64_t number = begin; number < end; ++number) body(Tile(tiles, number), panel);
  });
}

const kernels::MatrixKernels& matrix_kernels() {
  return kernels::of_this_cpu().matrices;
}

at::Tensor transposed(const at::Tensor& matrix) {
  const int64_t rows = matrix.size(0), columns = matrix.size(1);
  const at::Tensor result = at::empty({columns, rows}, matrix.options());
  const float* const from = matrix.const_data_ptr<float>();
  float* const to = result.mutable_data_ptr<float>();
  for_each_tile({rows, columns}, [&](const Tile& tile) {
    matrix_kernels().transpose(from + tile.row * columns + tile.column, columns, tile.rows, tile.columns,
                               to + tile.column * rows + tile.row, rows);
  });
  return result;
}

// The micro-kernel wants the weight transposed. For few rows, transposing x and each tile of the result is less work.
void product_of_transposed_x(const at::Tensor& x, const at::Tensor& weight, const float* bias, bool relu,
                             const at::Tensor& y) {
  const int64_t rows = x.size(0), in = weight.size(1), out = weight.size(0);
  const at::Tensor columns = transposed(x);
  const float* const from = columns.const_data_ptr<float>();
  const float* const weights = weight.const_data_ptr<float>();
  float* const to = y.mutable_data_ptr<float>();
  for_each_tile({out, rows}, from, rows, in, [&](const Tile& tile, Panel& panel) {
    float values[kTileRows * kTileColumns];
    for (int64_t i = 0; bias && i < tile.rows; ++i) {
      std::fill_n(values + i * tile.columns, tile.columns, bias[tile.row + i]);
    }
    multiply(tile.rows, tile.columns, in, weights + tile.row * in, in, panel.of(tile), panel.row(tile), values,
             tile.columns, /*adds=*/bias != nullptr);
    if (relu) matrix_kernels().relu(values, tile.columns, tile.rows, tile.columns);
    matrix_kernels().transpose(values, tile.columns, tile.rows, tile.columns, to + tile.column * out + tile.row, out);
  });
}

void product_with_transposed_weight(const at::Tensor& x, const at::Tensor& weight, const float* bias, bool relu,
                                    const at::Tensor& y) {
  const int64_t rows = x.size(0), in = weight.size(1), out = weight.size(0);
  const at::Tensor columns = transposed(weight);
  const float* const from = x.const_data_ptr<float>();
  const float* const weights = columns.const_data_ptr<float>();
  float* const to = y.mutable_data_ptr<float>();
  for_each_tile({rows, out}, weights, out, in, [&](const Tile& tile, Panel& panel) {
    float* const values = to + tile.row * out + tile.column;
    for (int64_t i = 0; bias && i < tile.rows; ++i) std::copy_n(bias + tile.column, tile.columns, values + i * out);
    multiply(tile.rows, tile.columns, in, from + tile.row * in, in, panel.of(tile), panel.row(tile), values, out,
             /*adds=*/bias != nullptr);
    if (relu) matrix_kernels().relu(values, out, tile.rows, tile.columns);
  });
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
    matrix_kernels().add(sum(sums_), columns_, rows_, columns_, sum(sums_ - 1), stride_of(sums_ - 1));
  }

  float* const tile_;
  const int64_t stride_;
  float* const scratch_;
  const int64_t rows_, columns_;
  int64_t sums_ = 0;
};

}  // namespace

at::Tensor linear_product(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                          bool relu) {
  const at::Tensor dense = x.contiguous(), y = at::empty({x.size(0), weight.size(0)}, x.options());
  const bool weight_is_smaller = weight.numel() <= x.numel() + y.numel();
  (weight_is_smaller ? product_with_transposed_weight : product_of_transposed_x)(
      dense, weight, bias ? bias->const_data_ptr<float>() : nullptr, relu, y);
  return y;
}

at::Tensor product_for_x(const at::Tensor& grad, const at::Tensor& weight) {
  const int64_t rows = grad.size(0), in = weight.size(1), out = weight.size(0);
  const at::Tensor result = at::empty({rows, in}, grad.options());
  const float* const from = grad.const_data_ptr<float>();
  const float* const weights = weight.const_data_ptr<float>();
  float* const to = result.mutable_data_ptr<float>();
  for_each_tile({rows, in}, weights, in, out, [&](const Tile& tile, Panel& panel) {
    multiply(tile.rows, tile.columns, out, from + tile.row * out, out, panel.of(tile), panel.row(tile),
             to + tile.row * in + tile.column, in, /*adds=*/false);
  });
  return result;
}

OutputGradient output_gradient(const at::Tensor& grad, const std::optional<at::Tensor>& y) {
  const int64_t rows = grad.size(0), out = grad.size(1);
  const at::Tensor dense = grad.contiguous();
  OutputGradient result{.grad = y ? at::empty({rows, out}, grad.options()) : dense,
                        .transposed = at::empty({out, rows}, grad.options()),
                        .sums = at::empty({out}, grad.options())};
  const float* const from = dense.const_data_ptr<float>();
  const float* const results = y ? y->const_data_ptr<float>() : nullptr;
  float* const passed = y ? result.grad.mutable_data_ptr<float>() : nullptr;
  float* const to = result.transposed.mutable_data_ptr<float>();
  float* const sums = result.sums.mutable_data_ptr<float>();
  const RowRanges ranges{.rows = out, .size = rows, .most = kTileRows};
  in_parallel(ranges.count(), [&](int64_t begin, int64_t end) {
    for (int64_t range = begin; range < end; ++range) {
      const int64_t first = range * kTileRows, count = ranges.rows_in(range);
      if (y) {
        matrix_kernels().mask(from + first, results + first, out, rows, count, passed + first);
      }
      matrix_kernels().transpose((y ? passed : from) + first, out, rows, count, to + first * rows, rows);
      matrix_kernels().row_sums(to + first * rows, rows, count, sums + first);
    }
  });
  return result;
}

GradientFactors gradient_factors(const at::Tensor& transposed_grad, const at::Tensor& x) {
  return {.grad = transposed_grad, .x = x.contiguous(), .sum_products = sum_products};
}

void sum_products(const std::vector<GradientFactors>& factors, const at::Tensor& sum) {
  const int64_t in = sum.size(1);
  int64_t levels = 1;
  while ((size_t{1} << levels) < factors.size()) ++levels;
  float* const values = sum.mutable_data_ptr<float>();
  for_each_tile({sum.size(0), in}, [&](const Tile& tile) {
    const std::unique_ptr<float[]> scratch(factors.size() > 1 ? new float[levels * kTileRows * kTileColumns] : nullptr);
    TileSum tile_sum(values + tile.row * in + tile.column, in, scratch.get(), tile.rows, tile.columns);
    for (size_t number = 0; number < factors.size(); ++number) {
      const auto& [grad, x, sums] = factors[number];
      const int64_t depth = x.size(0);
      tile_sum.add(number, grad.const_data_ptr<float>() + tile.row * depth, depth,
                   x.const_data_ptr<float>() + tile.column, in);
    }
  });
}

}  // namespace lockstep
