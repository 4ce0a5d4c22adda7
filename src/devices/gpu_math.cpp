#include "gpu_math.hpp"

#include <ATen/Context.h>

namespace lockstep {

GpuMath::GpuMath(const GpuMathOptions& options)
    : products_before_(at::globalContext().allowTF32CuBLAS()),
      convolutions_before_(at::globalContext().allowTF32CuDNN()),
      benchmark_before_(at::globalContext().benchmarkCuDNN()),
      reproducible_before_(at::globalContext().deterministicCuDNN()) {
  at::globalContext().setAllowTF32CuBLAS(options.tf32);
  at::globalContext().setAllowTF32CuDNN(options.tf32);
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

void search_algorithms(bool on) {
  at::globalContext().setBenchmarkCuDNN(on);
}

}  // namespace lockstep
