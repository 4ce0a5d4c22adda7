// Copies, adds and changes float32 matrices in the CPU's memory. It is compiled once per instruction set.
//
// The values of a matrix's row lie one after the other. `row_of_x` is the distance between the beginnings of two rows
// of x, in values. The kernels do not allocate, keep nothing and start no threads.
#pragma once

#include <cstdint>

namespace lockstep::kernels {

struct MatrixKernels {
  // Sets `to` [columns][rows] to the transpose of `from` [rows][columns].
  void (*transpose)(const float* from, int64_t row_of_from, int64_t rows, int64_t columns, float* to,
                    int64_t row_of_to);

  // Adds `values` to `sum`, both [rows][columns].
  void (*add)(const float* values, int64_t row_of_values, int64_t rows, int64_t columns, float* sum,
              int64_t row_of_sum);

  // Sets negative values [rows][columns] to 0. NaN stays.
  void (*relu)(float* values, int64_t row_of_values, int64_t rows, int64_t columns);

  // Sets `passed` to the gradient behind a ReLU: to `grad` where y is positive or NaN, elsewhere to 0. The three have
  // the same `row`.
  void (*mask)(const float* grad, const float* y, int64_t row, int64_t rows, int64_t columns, float* passed);

  // Sets `sums` [columns] to the sums of values [rows][columns] over the rows.
  void (*column_sums)(const float* values, int64_t row_of_values, int64_t rows, int64_t columns, float* sums);
};

}  // namespace lockstep::kernels
