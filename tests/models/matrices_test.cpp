// Labels: arithmetic
// The kernels on matrices, beside plain loops. Nothing outside of the target changes.
#include <gtest/gtest.h>

#include "models/kernels/kernels.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace matrices_test {

using lockstep::kernels::of_this_cpu;

constexpr float kCanary = 12345;

// A matrix whose rows lie `row` values apart, with canaries between and behind them.
struct Matrix {
  Matrix(int64_t rows_, int64_t columns_, int64_t gap)
      : rows(rows_), columns(columns_), row(columns_ + gap), values(rows_ * row + 64, kCanary) {}
  float& at(int64_t r, int64_t c) { return values[r * row + c]; }

  int64_t rows, columns, row;
  std::vector<float> values;
};

Matrix numbered(int64_t rows, int64_t columns, int64_t gap) {
  Matrix matrix(rows, columns, gap);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < columns; ++c) matrix.at(r, c) = static_cast<float>(r) + 0.001F * static_cast<float>(c);
  }
  if (rows > 0 && columns > 0) matrix.at(rows - 1, columns - 1) = -0.0F;
  return matrix;
}

const std::vector<int64_t> kSides = {0, 1, 3, 4, 5, 7, 8, 9, 15, 16, 17, 33};

TEST(Matrices, AreTransposed) {
  for (const int64_t rows : kSides) {
    for (const int64_t columns : kSides) {
      for (const int64_t gap : {0, 3}) {
        Matrix from = numbered(rows, columns, gap), to(columns, rows, gap), expected = to;
        for (int64_t r = 0; r < rows; ++r) {
          for (int64_t c = 0; c < columns; ++c) expected.at(c, r) = from.at(r, c);
        }
        of_this_cpu().matrices.transpose(from.values.data(), from.row, rows, columns, to.values.data(), to.row);
        ASSERT_EQ(to.values, expected.values) << rows << " x " << columns << ", gap " << gap;
      }
    }
  }
}

TEST(Matrices, AreAdded) {
  for (const int64_t rows : {0, 1, 5}) {
    for (const int64_t columns : kSides) {
      for (const int64_t gap : {0, 3}) {
        Matrix values = numbered(rows, columns, gap), sum = numbered(rows, columns, 2 * gap), expected = sum;
        for (int64_t r = 0; r < rows; ++r) {
          for (int64_t c = 0; c < columns; ++c) expected.at(r, c) += values.at(r, c);
        }
        of_this_cpu().matrices.add(values.values.data(), values.row, rows, columns, sum.values.data(), sum.row);
        ASSERT_EQ(sum.values, expected.values) << rows << " x " << columns << ", gap " << gap;
      }
    }
  }
}

TEST(Matrices, HaveTheirNegativeValuesCleared) {
  for (const int64_t columns : kSides) {
    Matrix values = numbered(5, columns, 3), expected = values;
    for (int64_t r = 0; r < 5; ++r) {
      for (int64_t c = 0; c < columns; ++c) {
        if ((r + c) % 3 == 0) values.at(r, c) = -1;
        expected.at(r, c) = std::max(values.at(r, c), 0.0F);
      }
    }
    of_this_cpu().matrices.relu(values.values.data(), values.row, 5, columns);
    ASSERT_EQ(values.values, expected.values) << columns;
  }
}

TEST(Matrices, LetGradientsPassWhereAReluHas) {
  for (const int64_t columns : kSides) {
    Matrix grad = numbered(5, columns, 3), y = numbered(5, columns, 3), passed(5, columns, 3), expected = passed;
    for (int64_t r = 0; r < 5; ++r) {
      for (int64_t c = 0; c < columns; ++c) {
        y.at(r, c) = c % 3 == 0 ? 0.0F : c % 3 == 1 ? 0.5F : NAN;
        expected.at(r, c) = c % 3 == 0 ? 0.0F : grad.at(r, c);
      }
    }
    of_this_cpu().matrices.mask(grad.values.data(), y.values.data(), y.row, 5, columns, passed.values.data());
    ASSERT_EQ(passed.values, expected.values) << columns;
  }
}

TEST(Matrices, HaveSumsOfTheirColumns) {
  for (const int64_t rows : {0, 1, 5, 256, 257, 1000}) {
    for (const int64_t columns : {1, 16, 35, 150}) {
      Matrix values(rows, columns, 3);
      std::vector<float> sums(columns + 1, kCanary), expected(columns + 1, 0);
      expected.back() = kCanary;
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t c = 0; c < columns; ++c) expected[c] += values.at(r, c) = static_cast<float>((c + 1) * (r % 7));
      }
      of_this_cpu().matrices.column_sums(values.values.data(), values.row, rows, columns, sums.data());
      ASSERT_EQ(sums, expected) << rows << " x " << columns;  // whole numbers add up exactly in any order
    }
  }
}

}  // namespace matrices_test
