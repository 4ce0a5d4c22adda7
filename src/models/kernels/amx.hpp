// Declares products of float32 matrices, and conv_relu_pool, by AMX: Intel's instructions for products of small tiles
// of bfloat16.
//
// Each float32 is the sum of three bfloat16, which have 8 bits each of its 24. Of the nine products of such parts, six
// are computed; the other three are below the rounding of float32 (Henry, Tang and Heinecke 2019, "Leveraging the
// bfloat16 …"). So results have float32's accuracy. But infinite factors, and those beyond 3.39e38, give NaN. Factors
// and products below 1e-31 lose their last bits, as AMX takes small numbers for 0. The kernels do not allocate, keep
// nothing and start no threads.
#pragma once

#include <cstdint>

#include "conv_relu_pool.hpp"

namespace lockstep::kernels {

// Value (i, j) of the matrix is values[i * row + j], or values[j * row + i] if the matrix lies transposed.
struct Factor {
  const float* values;
  int64_t row;  // the distance between the beginnings of two rows in memory
  bool is_transposed;
};

constexpr int64_t kAmxSum = 1024;  // sums over more of the depth would lose bits

// Call these only if has_amx() (devices/micro_kernel.hpp).
struct AmxKernels {
  // Gives the number of values of `scratch` for a product.
  int64_t (*scratch)(int64_t rows, int64_t columns, int64_t depth);

  // Sets c [rows][columns] to a * b, or begins its sums with what is in c. After each kAmxSum of the depth a
  // new sum begins, which is added to c. A value's bits depend on a row of a and a column of b alone.
  //   a  [rows, depth]
  //   b  [depth, columns]
  void (*multiply)(int64_t rows, int64_t columns, int64_t depth, const Factor& a, const Factor& b, float* c,
                   int64_t row_of_c, bool adds, float* scratch);

  const ConvReluPoolPasses& conv_relu_pool;
};

}  // namespace lockstep::kernels
