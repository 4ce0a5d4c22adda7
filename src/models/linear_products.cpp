#include "linear_products.hpp"

#include <ATen/ops/empty.h>

#include "devices/micro_kernel.hpp"
#include "intra_op.hpp"
#include "models/kernels/kernels.hpp"

#include <algorithm>
#include <cstdint>

namespace lockstep {
namespace {

// The micro-kernel's tiles are that high. Those of forward are at most that wide: 32 kB, which the first-level cache
// holds. Widths are rounded to vectors of so many floats.
constexpr int64_t kTileRows = 64, kTileColumns = 128, kLanes = 16;

// AMX's tiles have at most so many rows and columns, so that their factors' parts stay in the second-level cache.
constexpr int64_t kAmxSide = 512;

// Chooses AMX or the micro-kernel for all three products of a layer. `rows` are those of x and of y's gradient, and so
// the depth of the weight's gradient. Few rows do not pay for splitting the weight (docs/decisions/0083).
bool takes_amx(int64_t rows) {
  return rows >= 64 && has_amx();
}

// Gives how many rows of a second factor are multiplied at once: they span 512 kB. Rows that are 2 or 4 kB apart
// fall into the same places of the second-level cache, and 512 kB were faster than 1 MB (docs/decisions/0080). With
// fewer than 64 rows the tile would be read and written too often. With 1,024 at most, a panel's width does not matter.
int64_t depth_of_block(int64_t row_of_b) {
  return std::clamp<int64_t>((1 << 17) / row_of_b, 64, 1024);
}

// Gives how wide tiles of a product may be, so that what a tile reads of a block stays in the second-level cache: 256
// kB, or more where tiles would be narrower than kTileColumns.
int64_t widest_for(int64_t depth, int64_t row_of_b) {
  return std::clamp<int64_t>((1 << 16) / std::min(depth, depth_of_block(row_of_b)), kTileColumns, 4 * kTileColumns);
}

// Cuts a matrix into tiles, all nearly as wide, and numbers them column by column: neighbours read the same columns of
// the second factor.
struct Tiles {
  Tiles(int64_t rows, int64_t columns, int64_t widest = kTileColumns, int64_t height = kTileRows)
      : rows(rows), columns(columns), height(height), down((rows + height - 1) / height) {
    const int64_t across = (columns + widest - 1) / widest;
    width = ((columns + across - 1) / across + kLanes - 1) / kLanes * kLanes;
  }

  int64_t count() const { return down * ((columns + width - 1) / width); }

  const int64_t rows, columns, height, down;
  int64_t width;
};

struct Tile {
  Tile(const Tiles& of, int64_t number)
      : row(number % of.down * of.height),
        column(number / of.down * of.width),
        rows(std::min(of.height, of.rows - row)),
        columns(std::min(of.width, of.columns - column)) {}

  const int64_t row, column, rows, columns;
};

// Calls body(tile) for all tiles, on all intra-op threads.
void for_each_tile(const Tiles& tiles, const auto& body) {
  for_each_in_parallel(tiles.count(), [&](int64_t number) { body(Tile(tiles, number)); });
}

const kernels::MatrixKernels& matrix_kernels() {
  return kernels::of_this_cpu().matrices;
}

// Computes a tile of a * b, or adds it to what is in c. Bits depend on the depth, and on the distance of b's rows,
// which says how many blocks there are, but not on the tile's width.
void product_by_micro_kernel(const Tile& tile, int64_t depth, const float* a, const float* b, int64_t row_of_b,
                             float* c, int64_t row_of_c, bool adds) {
  const int64_t block = depth_of_block(row_of_b);
  for (int64_t first = 0; first < depth; first += block) {
    multiply(tile.rows, tile.columns, std::min(block, depth - first), a + first, depth, b + first * row_of_b, row_of_b,
             c, row_of_c, adds || first > 0);
  }
}

// Gives the part of a matrix that begins with a row and a column. The matrix may lie transposed.
kernels::Factor factor_of(const at::Tensor& matrix, int64_t row, int64_t column) {
  const bool is_transposed = matrix.stride(1) != 1;
  return {matrix.const_data_ptr<float>() + row * matrix.stride(0) + column * matrix.stride(1),
          matrix.stride(is_transposed ? 1 : 0), is_transposed};
}

// Computes a tile of a * b, or adds it. AMX alone can take a matrix that lies transposed.
void product(bool by_amx, const Tile& tile, const at::Tensor& a, const at::Tensor& b, float* c, int64_t row_of_c,
             bool adds) {
  const int64_t depth = a.size(1);
  if (!by_amx) {
    return product_by_micro_kernel(tile, depth, a.const_data_ptr<float>() + tile.row * depth,
                                   b.const_data_ptr<float>() + tile.column, b.size(1), c, row_of_c, adds);
  }
  const kernels::AmxKernels& amx = *kernels::of_this_cpu().amx;
  const at::Tensor scratch = at::empty({amx.scratch(tile.rows, tile.columns, depth)}, a.options());
  amx.multiply(tile.rows, tile.columns, depth, factor_of(a, tile.row, 0), factor_of(b, 0, tile.column), c, row_of_c,
               adds, scratch.mutable_data_ptr<float>());
}

// Cuts c into tiles for product(). AMX can compute the micro-kernel's tiles too, which sum_products() takes where
// factors differ. The longer side of AMX's own is halved until all threads have one, since the time to split a tile's
// factors grows with both sides' sum.
Tiles tiles_of(bool by_amx, const at::Tensor& c, int64_t depth, int64_t longest = kAmxSide) {
  const int64_t rows = c.size(0), columns = c.size(1);
  if (!by_amx) return {rows, columns, widest_for(depth, columns)};
  int64_t height = std::min(rows, longest), width = std::min(columns, longest);
  while (Tiles(rows, columns, width, height).count() < at::get_num_threads() && std::max(height, width) > kTileRows) {
    int64_t& longer = height > width ? height : width;
    longer = (longer / 2 + 31) / 32 * 32;  // AMX computes squares of 32 x 32
  }
  return {rows, columns, width, height};
}

// Computes y with bias and ReLU, where compute(tile, to, adds) sets a tile of the product or adds it.
void linear_tiles(const Tiles& tiles, const float* bias, bool relu, const at::Tensor& y, const auto& compute) {
  const int64_t out = y.size(1);
  float* const to = y.mutable_data_ptr<float>();
  for_each_tile(tiles, [&](const Tile& tile) {
    float* const values = to + tile.row * out + tile.column;
    for (int64_t i = 0; bias && i < tile.rows; ++i) std::copy_n(bias + tile.column, tile.columns, values + i * out);
    compute(tile, values, /*adds=*/bias != nullptr);
    if (relu) matrix_kernels().relu(values, out, tile.rows, tile.columns);
  });
}

// Gives the transpose of a matrix as a second factor in panels: the columns of a tile lie together, row by row.
at::Tensor transposed(const at::Tensor& matrix) {
  const int64_t depth = matrix.size(1);
  const at::Tensor result = at::empty({depth, matrix.size(0)}, matrix.options());
  const float* const from = matrix.const_data_ptr<float>();
  float* const to = result.mutable_data_ptr<float>();
  for_each_tile({depth, matrix.size(0)}, [&](const Tile& tile) {
    matrix_kernels().transpose(from + tile.column * depth + tile.row, depth, tile.columns, tile.rows,
                               to + tile.column * depth + tile.row * tile.columns, tile.columns);
  });
  return result;
}

// The micro-kernel wants the weight transposed. For few rows, transposing x and each tile of the result is less work.
void product_of_transposed_x(const at::Tensor& x, const at::Tensor& weight, const float* bias, bool relu,
                             const at::Tensor& y) {
  const int64_t rows = x.size(0), in = weight.size(1), out = weight.size(0);
  const at::Tensor panels = transposed(x);
  const float* const columns = panels.const_data_ptr<float>();
  const float* const weights = weight.const_data_ptr<float>();
  float* const to = y.mutable_data_ptr<float>();
  for_each_tile({out, rows}, [&](const Tile& tile) {
    alignas(64) float values[kTileRows * kTileColumns];
    for (int64_t i = 0; bias && i < tile.rows; ++i) {
      std::fill_n(values + i * tile.columns, tile.columns, bias[tile.row + i]);
    }
    product_by_micro_kernel(tile, in, weights + tile.row * in, columns + tile.column * in, tile.columns, values,
                            tile.columns,
                            /*adds=*/bias != nullptr);
    if (relu) matrix_kernels().relu(values, tile.columns, tile.rows, tile.columns);
    matrix_kernels().transpose(values, tile.columns, tile.rows, tile.columns, to + tile.column * out + tile.row, out);
  });
}

void product_with_transposed_weight(const at::Tensor& x, const at::Tensor& weight, const float* bias, bool relu,
                                    const at::Tensor& y) {
  const int64_t in = weight.size(1), out = weight.size(0);
  const at::Tensor panels = transposed(weight);
  const float *const from = x.const_data_ptr<float>(), *const columns = panels.const_data_ptr<float>();
  linear_tiles({x.size(0), out}, bias, relu, y, [&](const Tile& tile, float* to, bool adds) {
    product_by_micro_kernel(tile, in, from + tile.row * in, columns + tile.column * in, tile.columns, to, out, adds);
  });
}

// Sums one tile of sum_products(). The tree keeps a sum per level: the first in the tile itself, others in `scratch`.
class TileSum {
 public:
  TileSum(const Tile& tile, float* sum, int64_t stride, float* scratch)
      : tile_(tile), sum_(sum), stride_(stride), scratch_(scratch) {}

  // Adds product `number`; give the products in their order. A right half is added to the left one at once, if it is
  // one block: of two blocks l + (b1 + b2) would become (l + b1) + b2. AMX would add parts of a product.
  void add(size_t number, const at::Tensor& a, const at::Tensor& b) {
    const bool is_right_half = number % 2 == 1, by_amx = takes_amx(a.size(1));
    const bool adds = is_right_half && !by_amx && a.size(1) <= depth_of_block(b.size(1));
    if (!adds) ++sums_;
    product(by_amx, tile_, a, b, sum(sums_ - 1), stride_of(sums_ - 1), adds);
    if (!is_right_half) return;
    if (!adds) add_last_two();
    for (size_t pairs = (number + 1) / 2; pairs % 2 == 0; pairs /= 2) add_last_two();
  }

 private:
  float* sum(int64_t number) const { return number == 0 ? sum_ : scratch_ + (number - 1) * tile_.rows * tile_.columns; }
  int64_t stride_of(int64_t number) const { return number == 0 ? stride_ : tile_.columns; }

  void add_last_two() {
    --sums_;
    matrix_kernels().add(sum(sums_), tile_.columns, tile_.rows, tile_.columns, sum(sums_ - 1), stride_of(sums_ - 1));
  }

  const Tile& tile_;
  float* const sum_;
  const int64_t stride_;
  float* const scratch_;
  int64_t sums_ = 0;
};

}  // namespace

at::Tensor linear_product(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                          bool relu) {
  const at::Tensor dense = x.contiguous(), y = at::empty({x.size(0), weight.size(0)}, x.options());
  const float* const biases = bias ? bias->const_data_ptr<float>() : nullptr;
  if (takes_amx(x.size(0))) {
    linear_tiles(tiles_of(/*by_amx=*/true, y, x.size(1)), biases, relu, y,
                 [&, turned = weight.t()](const Tile& tile, float* to, bool adds) {
                   product(/*by_amx=*/true, tile, dense, turned, to, y.size(1), adds);
                 });
    return y;
  }
  const bool weight_is_smaller = weight.numel() < x.numel() + y.numel();
  (weight_is_smaller ? product_with_transposed_weight : product_of_transposed_x)(dense, weight, biases, relu, y);
  return y;
}

at::Tensor product_for_x(const at::Tensor& grad, const at::Tensor& weight) {
  const int64_t in = weight.size(1);
  const bool by_amx = takes_amx(grad.size(0));
  const at::Tensor result = at::empty({grad.size(0), in}, grad.options());
  float* const to = result.mutable_data_ptr<float>();
  for_each_tile(tiles_of(by_amx, result, weight.size(0)), [&](const Tile& tile) {
    product(by_amx, tile, grad, weight, to + tile.row * in + tile.column, in, /*adds=*/false);
  });
  return result;
}

OutputGradient output_gradient(const at::Tensor& grad, const std::optional<at::Tensor>& y) {
  const int64_t rows = grad.size(0), out = grad.size(1);
  const at::Tensor dense = grad.contiguous();
  OutputGradient result{.grad = y ? at::empty({rows, out}, grad.options()) : dense,
                        .transposed = takes_amx(rows) ? at::Tensor() : at::empty({out, rows}, grad.options()),
                        .sums = at::empty({out}, grad.options())};
  const float* const from = dense.const_data_ptr<float>();
  const float* const results = y ? y->const_data_ptr<float>() : nullptr;
  float* const passed = y ? result.grad.mutable_data_ptr<float>() : nullptr;
  float* const to = result.transposed.defined() ? result.transposed.mutable_data_ptr<float>() : nullptr;
  float* const sums = result.sums.mutable_data_ptr<float>();
  const RowRanges ranges{.rows = out, .size = rows, .most = kTileRows};
  for_each_in_parallel(ranges.count(), [&](int64_t range) {
    const int64_t first = range * kTileRows, count = ranges.rows_in(range);
    if (y) matrix_kernels().mask(from + first, results + first, out, rows, count, passed + first);
    const float* const values = (y ? passed : from) + first;
    matrix_kernels().column_sums(values, out, rows, count, sums + first);
    if (to) matrix_kernels().transpose(values, out, rows, count, to + first * rows, rows);
  });
  if (!to) result.transposed = result.grad.t();
  return result;
}

GradientFactors gradient_factors(const at::Tensor& transposed_grad, const at::Tensor& x) {
  return {.grad = transposed_grad, .x = x.contiguous(), .sum_products = sum_products};
}

void sum_products(const std::vector<GradientFactors>& factors, const at::Tensor& sum) {
  const int64_t in = sum.size(1);
  int64_t levels = 0;  // beside the first
  while ((size_t{1} << levels) < factors.size()) ++levels;
  float* const values = sum.mutable_data_ptr<float>();
  const int64_t longest = levels > 0 ? kAmxSide / 2 : kAmxSide;  // the cache holds the levels' sums too
  const bool by_amx = std::all_of(factors.begin(), factors.end(), [](auto& each) { return takes_amx(each.x.size(0)); });
  for_each_tile(tiles_of(by_amx, sum, factors[0].x.size(0), longest), [&](const Tile& tile) {
    const at::Tensor scratch = levels > 0 ? at::empty({levels, tile.rows, tile.columns}, sum.options()) : sum;
    TileSum tile_sum(tile, values + tile.row * in + tile.column, in, scratch.mutable_data_ptr<float>());
    for (size_t number = 0; number < factors.size(); ++number) {
      tile_sum.add(number, factors[number].grad, factors[number].x);
    }
  });
}

}  // namespace lockstep
