#include "gpu_math.hpp"

#include <ATen/Context.h>

namespace lockstep {

GpuMath::GpuMath(const GpuMathOptions& options)
    : products_before_(at::globalContext().allowTF32CuBLAS()),
      convolutions_before_(at::globalContext().allowTF32CuDNN()),
      benchmark_before_(at::globalContext().benchmarkCuDNN()),
      reproducible_before_(at::globalContext().deterministicCuDNN()) {
  if (options.tf32) {  // else the user's setting stays: by default convolutions use TF32, and products do not
    at::globalContext().setAllowTF32CuBLAS(true);
    at::globalContext().setAllowTF32CuDNN(true);
  }
  if (options.fixed_shapes) at::globalContext().setBenchmarkCuDNN(true);
  if (options.reproducible) {  // no trials either: they may end otherwise each time
    at::globalContext().setDeterministicCuDNN(true);
    at::globalContext().setBenchmarkCuDNN(false);
  }
}

GpuMath::~GpuMath() {
  at::globalContext().setDeterministicCuDNN(reproducible_before_);
  at::globalContext().setBenchmarkCuDNN(benchmark_before_);
  at::globalContext().setAllowTF32CuDNN(convolutions_before_);
  at::globalContext().setAllowTF32CuBLAS(products_before_);
}

}  // namespace lockstep
