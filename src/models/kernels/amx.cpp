#include "amx.hpp"

#include <immintrin.h>

namespace lockstep::kernels {
namespace {

constexpr int64_t kLanes = 16;

}  // namespace
}  // namespace lockstep::kernels

#include "vectors.inc"

namespace lockstep::kernels {
namespace {

// A tile has 16 rows of 16 words, which are pairs of bfloat16: of a, 16 of its rows and 32 of the depth; of b, 16 pairs
// of the depth and 16 columns. A square of c is 2 by 2 tiles. So much of the depth is split at once, that the parts of
// 512 rows and of 512 columns stay in a second-level cache of 2 MB.
constexpr int64_t kSide = 16, kSquare = 2 * kSide, kStep = 32, kDepth = 128;
constexpr int64_t kTile = kSide * kStep, kParts = 3;  // values of a tile

using Words [[gnu::vector_size(kLanes * 4), gnu::aligned(4), gnu::may_alias]] = uint32_t;

int64_t smaller_of(int64_t a, int64_t b) {
  return a < b ? a : b;
}

int64_t in_squares(int64_t lines) {
  return (lines + kSquare - 1) / kSquare * kSquare;
}

// ---- Parts ---------------------------------------------------------------------------------------------------------

// Gives a factor's lines, which are the rows of a or the columns of b, along the depth.
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
  const bool are_rows;  // a line's values lie one after the other
  const bool turns;     // a tile's words lie transposed in memory
};

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
  constexpr uint32_t high = 0xffff0000;
  for (int64_t i = 0; i < kSide; ++i) {
    const float* const at = from + (are_rows ? i : 2 * i) * row;
    Vector first = load(at), second = load(at + (are_rows ? kLanes : row));
    if (are_rows) {
      const Vector all = first;
      first = every_second<0>(all, second), second = every_second<1>(all, second);
    }
    for (int64_t part = 0; part < kParts; ++part) {
      const uint32_t half = part < kParts - 1 ? 0x8000 : 0;
      const Words one = ((Words)first + half) & high, other = ((Words)second + half) & high;
      store(reinterpret_cast<float*>(parts + part * kTile + i * kStep), (Vector)(one >> 16 | other));
      first -= (Vector)one, second -= (Vector)other;
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

// Computes a square of c, or adds to it.
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
  asm volatile("" ::: "memory");
}

void copy(const float* from, int64_t row_of_from, int64_t rows, int64_t columns, float* to, int64_t row_of_to) {
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < columns; ++j) to[i * row_of_to + j] = from[i * row_of_from + j];
  }
}

int64_t scratch_of(int64_t rows, int64_t columns) {
  return (in_squares(rows) + in_squares(columns)) * kDepth * kParts / 2;  // two bfloat16 per value
}

void multiply(int64_t rows, int64_t columns, int64_t depth, const Factor& a, const Factor& b, float* c,
              int64_t row_of_c, bool adds, float* scratch) {
  static constexpr TileSizes sizes;
  _tile_loadconfig(&sizes);
  const Lines of_a(a, /*is_left=*/true), of_b(b, /*is_left=*/false);
  auto* const left = reinterpret_cast<uint16_t*>(scratch);
  uint16_t* const right = left + in_squares(rows) * kDepth * kParts;
  for (int64_t k = 0; k < depth; k += kDepth, adds = true) {
    const int64_t size = smaller_of(kDepth, depth - k), steps = (size + kStep - 1) / kStep;
    split(of_a, rows, k, size, left);
    split(of_b, columns, k, size, right);
    for (int64_t i = 0; i < rows; i += kSquare) {
      for (int64_t j = 0; j < columns; j += kSquare) {
        const uint16_t *const from_a = left + i * steps * kStep * kParts, *const from_b =
                                                                              right + j * steps * kStep * kParts;
        float* const to = c + i * row_of_c + j;
        const int64_t high = smaller_of(kSquare, rows - i), wide = smaller_of(kSquare, columns - j);
        if (high == kSquare && wide == kSquare) {
          multiply_square(from_a, from_b, steps, to, row_of_c, adds);
          continue;
        }
        float whole[kSquare * kSquare] = {};
        if (adds) copy(to, row_of_c, high, wide, whole, kSquare);
        multiply_square(from_a, from_b, steps, whole, kSquare, adds);
        copy(whole, kSquare, high, wide, to, row_of_c);
      }
    }
  }
  _tile_release();
}

}  // namespace

extern constinit const AmxKernels amx = {scratch_of, multiply};

}  // namespace lockstep::kernels
