// finite_sum gives one number that tells whether all numbers of some tensors are finite.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/view_as_real.h>

#include <vector>

namespace lockstep {

// Gives the sum over all defined tensors, as float64 on `device`; on a GPU it is a sum of magnitudes. It is finite if
// all numbers are finite. Waits for no GPU.
at::Tensor finite_sum(const std::vector<at::Tensor>& tensors, const c10::Device& device);

// Sets `found`, float [1] on the tensors' GPU, to 1 if a number is not finite, and else leaves it. Takes one pass over
// the tensors, and a few launches. Waits for no GPU. `one` holds 1 there: the operator is one that scales, too.
void find_not_finite(const std::vector<at::Tensor>& tensors, at::Tensor found, const at::Tensor& one);

// Gives the real and imaginary parts of a complex tensor, sharing its memory where possible; any other tensor itself.
// Most of LibTorch's reductions refuse complex numbers, or give complex results.
inline at::Tensor real_values(const at::Tensor& tensor) {
  return tensor.is_complex() ? at::view_as_real(tensor.resolve_conj()) : tensor;
}

}  // namespace lockstep
