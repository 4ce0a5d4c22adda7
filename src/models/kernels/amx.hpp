// Declares products of float32 matrices by AMX, Intel's instructions for products of small tiles of bfloat16.
//
// Each float32 is the sum of three bfloat16, which have 8 bits each of its 24. Of the nine products of such parts, six
// are computed; the other three are below the rounding of float32 (Henry, Tang and Heinecke 2019, "Leveraging the
// bfloat16 …"). So results have float32's accuracy. But infinite factors, and those beyond 3.39e38, give NaN, and of
// factors below 1e-33 the last bits are lost. The kernels do not allocate, keep nothing and start no threads.
#pragma once

#include <cstdint>

namespace lockstep::kernels {

// Value (i, j) of the matrix is values[i * row + j], or values[j * row + i] if the matrix lies transposed.
struct Factor {
  const float* values;
  int64_t row;
  bool is_transposed;
};

struct AmxKernels {
  // Gives the number of values of `scratch` for a product [rows][columns].
  int64_t (*scratch)(int64_t rows, int64_t columns);

  // Sets c [rows][columns] to a * b, or adds one product after the other to what is in c. Call it only if has_amx()
  // (devices/micro_kernel.hpp). A value's bits depend on its row of a and its column of b alone.
  //   a  [rows, depth]
  //   b  [depth, columns]
  void (*multiply)(int64_t rows, int64_t columns, int64_t depth, const Factor& a, const Factor& b, float* c,
                   int64_t row_of_c, bool adds, float* scratch);
};

}  // namespace lockstep::kernels
