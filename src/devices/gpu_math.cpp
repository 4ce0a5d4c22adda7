#include "gpu_math.hpp"

#include <ATen/Context.h>

namespace lockstep {

GpuMath::GpuMath(bool tf32, bool fixed_shapes)
    : products_before_(at::globalContext().allowTF32CuBLAS()),
      convolutions_before_(at::globalContext().allowTF32CuDNN()),
      benchmark_before_(at::globalContext().benchmarkCuDNN()) {
  if (tf32) {  // else as the user has set it: LibTorch's default lets convolutions use TF32, and products not
    at::globalContext().setAllowTF32CuBLAS(true);
    at::globalContext().setAllowTF32CuDNN(true);
  }
  if (fixed_shapes) at::globalContext().setBenchmarkCuDNN(true);
}

GpuMath::~GpuMath() {
  at::globalContext().setBenchmarkCuDNN(benchmark_before_);
  at::globalContext().setAllowTF32CuDNN(convolutions_before_);
  at::globalContext().setAllowTF32CuBLAS(products_before_);
}

}  // namespace lockstep
