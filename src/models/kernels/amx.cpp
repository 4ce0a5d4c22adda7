#include "amx.hpp"

#include <immintrin.h>

namespace lockstep::kernels {
namespace {

constexpr int64_t kLanes = 16;

}  // namespace
}  // namespace lockstep::kernels

#include "groups.inc"
#include "vectors.inc"

namespace lockstep::kernels {
namespace {

// A tile has 16 rows of 16 words, which are pairs of bfloat16 from along the depth. A row is one of a's rows with 16
// pairs, or a pair with 16 of b's columns. A square of c is 2 by 2 tiles. kDepth of the depth are split at once. So the
// parts of 512 rows and of 512 columns stay in a second-level cache of 2 MB.
constexpr int64_t kSide = 16, kSquare = 2 * kSide, kStep = 32, kDepth = 128;
static_assert(kAmxSum % kDepth == 0);
constexpr int64_t kTile = kSide * kStep, kParts = 3;  // kTile is the number of a tile's values

using Words [[gnu::vector_size(kLanes * 4), gnu::aligned(4), gnu::may_alias]] = uint32_t;

int64_t in_squares(int64_t lines) {
  return groups_of(lines, kSquare) * kSquare;
}

// ---- Parts ---------------------------------------------------------------------------------------------------------

// Gives a factor's lines, which are the rows of a or the columns of b, along the depth.
//   a, and b where it lies transposed      lines are rows in memory
//   b, and a where it lies transposed      lines are columns in memory
// A tile's words come from memory as the tile has them, but for factors that lie transposed.
struct Lines {
  Lines(const Factor& factor, bool is_left)
      : values(factor.values),
        row(factor.row),
        are_rows(is_left != factor.is_transposed),
        turns(factor.is_transposed) {}

  const float* at(int64_t line, int64_t depth) const {
    return values + (are_rows ? line * row + depth : depth * row + line);
  }

  const float* const values;
  const int64_t row;
  const bool are_rows;
  const bool turns;  // a tile's words must be transposed
};

// Takes every second value from `first` on.
template <int first>
Vector every_second(Vector a, Vector b) {
  return __builtin_shufflevector(a, b, first, first + 2, first + 4, first + 6, first + 8, first + 10, first + 12,
                                 first + 14, first + 16, first + 18, first + 20, first + 22, first + 24, first + 26,
                                 first + 28, first + 30);
}

// Sets the parts of a tile, 16 lines by 32 of the depth. The first two parts are rounded, so that the products that are
// left out are small and of either sign. What is left has no more than 8 bits; and of a NaN, all is left.
template <bool are_rows>
void split_tile(const float* from, int64_t row, bool turns, uint16_t* parts) {
  constexpr uint32_t upper_half = 0xffff0000;
  for (int64_t i = 0; i < kSide; ++i) {
    const float* const at = from + (are_rows ? i : 2 * i) * row;
    Vector low = load(at), high = load(at + (are_rows ? kLanes : row));
    if (are_rows) {
      const Vector left = low;
      low = every_second<0>(left, high), high = every_second<1>(left, high);
    }
    for (int64_t part = 0; part < kParts; ++part) {
      const uint32_t rounding = part < kParts - 1 ? 0x8000 : 0;
      const Words of_low = ((Words)low + rounding) & upper_half, of_high = ((Words)high + rounding) & upper_half;
      store(reinterpret_cast<float*>(parts + part * kTile + i * kStep), (Vector)(of_low >> 16 | of_high));
      low -= (Vector)of_low, high -= (Vector)of_high;
    }
  }
  for (int64_t part = 0; turns && part < kParts; ++part, parts += kTile) {
    auto* const words = reinterpret_cast<float*>(parts);
    Vector rows[kSide];
    for (int64_t i = 0; i < kSide; ++i) rows[i] = load(words + i * kSide);
    transpose(rows);
    for (int64_t i = 0; i < kSide; ++i) store(words + i * kSide, rows[i]);
  }
}

// Splits the lines from `depth` on. The parts lie [tile of lines][step of the depth][part]. There are zeros behind the
// last line and the last of the depth.
template <bool are_rows>
void split(const Lines& lines, int64_t count, int64_t depth, int64_t size, uint16_t* parts) {
  constexpr int64_t columns = are_rows ? kStep : kSide;
  for (int64_t line = 0; line < in_squares(count); line += kSide) {
    for (int64_t k = 0; k < size; k += kStep, parts += kParts * kTile) {
      const int64_t wide = smaller_of(kSide, count - line), deep = smaller_of(kStep, size - k);
      if (wide == kSide && deep == kStep) {
        split_tile<are_rows>(lines.at(line, depth + k), lines.row, lines.turns, parts);
        continue;
      }
      float padded[kTile] = {};
      for (int64_t i = 0; i < wide; ++i) {
        for (int64_t j = 0; j < deep; ++j) {
          padded[are_rows ? i * columns + j : j * columns + i] = *lines.at(line + i, depth + k + j);
        }
      }
      split_tile<are_rows>(padded, columns, lines.turns, parts);
    }
  }
}

void split(const Lines& lines, int64_t count, int64_t depth, int64_t size, uint16_t* parts) {
  (lines.are_rows ? split<true> : split<false>)(lines, count, depth, size, parts);
}

// ---- Tiles ---------------------------------------------------------------------------------------------------------

// Registers 0 to 3 have the square of c, 4 and 5 two tiles of a, and 6 and 7 two tiles of b.
struct alignas(64) TileSizes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes_of_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

inline void load_left(const uint16_t* parts, int64_t row_of_tiles) {
  _tile_loadd(4, parts, 2 * kStep);
  _tile_loadd(5, parts + row_of_tiles, 2 * kStep);
}

inline void load_right(const uint16_t* parts, int64_t row_of_tiles) {
  _tile_loadd(6, parts, 2 * kStep);
  _tile_loadd(7, parts + row_of_tiles, 2 * kStep);
}

inline void add_products() {
  _tile_dpbf16ps(0, 4, 6);
  _tile_dpbf16ps(1, 4, 7);
  _tile_dpbf16ps(2, 5, 6);
  _tile_dpbf16ps(3, 5, 7);
}

// Sums up a square of a product, from 0 or from what is in c.
void multiply_square(const uint16_t* a, const uint16_t* b, int64_t steps, float* c, int64_t row_of_c, bool adds) {
  const int64_t row_of_tiles = steps * kParts * kTile;
  float* const below = c + kSide * row_of_c;
  asm volatile("" ::: "memory");  // GCC does not know that tiles are loaded from memory
  if (adds) {
    _tile_loadd(0, c, 4 * row_of_c);
    _tile_loadd(1, c + kSide, 4 * row_of_c);
    _tile_loadd(2, below, 4 * row_of_c);
    _tile_loadd(3, below + kSide, 4 * row_of_c);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t step = 0; step < steps; ++step, a += kParts * kTile, b += kParts * kTile) {
    load_left(a + 2 * kTile, row_of_tiles);  // small products come first
    load_right(b, row_of_tiles);
    add_products();
    load_left(a + kTile, row_of_tiles);
    add_products();
    load_right(b + kTile, row_of_tiles);
    add_products();
    load_left(a, row_of_tiles);
    add_products();
    load_right(b + 2 * kTile, row_of_tiles);
    add_products();
    load_right(b, row_of_tiles);
    add_products();
  }
  _tile_stored(0, c, 4 * row_of_c);
  _tile_stored(1, c + kSide, 4 * row_of_c);
  _tile_stored(2, below, 4 * row_of_c);
  _tile_stored(3, below + kSide, 4 * row_of_c);
  asm volatile("" ::: "memory");  // nor that they are stored there
}

// Multiplies the parts of rows and columns.
void multiply_parts(const uint16_t* left, int64_t rows, const uint16_t* right, int64_t columns, int64_t steps, float* c,
                    int64_t row_of_c, bool adds) {
  for (int64_t i = 0; i < rows; i += kSquare) {
    for (int64_t j = 0; j < columns; j += kSquare) {
      const uint16_t *const a = left + i * steps * kStep * kParts, *const b = right + j * steps * kStep * kParts;
      float* const to = c + i * row_of_c + j;
      const int64_t high = smaller_of(kSquare, rows - i), wide = smaller_of(kSquare, columns - j);
      if (high == kSquare && wide == kSquare) {
        multiply_square(a, b, steps, to, row_of_c, adds);
        continue;
      }
      alignas(64) float square[kSquare][kSquare] = {};
      for (int64_t row = 0; adds && row < high; ++row) {
        for (int64_t column = 0; column < wide; ++column) square[row][column] = to[row * row_of_c + column];
      }
      multiply_square(a, b, steps, square[0], kSquare, adds);
      for (int64_t row = 0; row < high; ++row) {
        for (int64_t column = 0; column < wide; ++column) to[row * row_of_c + column] = square[row][column];
      }
    }
  }
}

int64_t scratch_of(int64_t rows, int64_t columns, int64_t depth) {
  const int64_t deep = smaller_of(kDepth, groups_of(depth, kStep) * kStep);
  const int64_t of_parts = (in_squares(rows) + in_squares(columns)) * deep * kParts / 2;  // two bfloat16 per value
  return of_parts + (depth > kAmxSum ? rows * columns : 0);
}

void multiply(int64_t rows, int64_t columns, int64_t depth, const Factor& a, const Factor& b, float* c,
              int64_t row_of_c, bool adds, float* scratch) {
  static constexpr TileSizes sizes;
  _tile_loadconfig(&sizes);
  const Lines of_a(a, /*is_left=*/true), of_b(b, /*is_left=*/false);
  auto* const left = reinterpret_cast<uint16_t*>(scratch);
  float* const sums = scratch + scratch_of(rows, columns, kDepth);
  for (int64_t k = 0; k < depth; k += kDepth) {
    const int64_t size = smaller_of(kDepth, depth - k), steps = groups_of(size, kStep);
    uint16_t* const right = left + in_squares(rows) * steps * kStep * kParts;
    split(of_a, rows, k, size, left);
    split(of_b, columns, k, size, right);
    const bool is_first = k < kAmxSum, begins = k % kAmxSum == 0;
    multiply_parts(left, rows, right, columns, steps, is_first ? c : sums, is_first ? row_of_c : columns,
                   k == 0 ? adds : !begins);
    if (is_first || ((k + kDepth) % kAmxSum != 0 && k + kDepth < depth)) continue;
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t column = 0; column < columns; ++column) c[row * row_of_c + column] += sums[row * columns + column];
    }
  }
  _tile_release();
}

}  // namespace

extern constinit const AmxKernels amx = {scratch_of, multiply};

}  // namespace lockstep::kernels
