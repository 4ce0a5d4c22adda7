// Gives the real numbers that sums and norms take. Most of LibTorch's reductions take no complex numbers, or give some.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/view_as_real.h>

namespace lockstep {

// The real and imaginary parts of a complex tensor, sharing its memory where possible; any other tensor itself.
inline at::Tensor real_values(const at::Tensor& tensor) {
  return tensor.is_complex() ? at::view_as_real(tensor.resolve_conj()) : tensor;
}

}  // namespace lockstep
