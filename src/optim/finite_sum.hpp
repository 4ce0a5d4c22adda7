// finite_sum: one number that tells whether all numbers of some tensors are finite.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace lockstep {

// A sum over all defined tensors, as float64 on `device`: of their numbers, or on a GPU of these without signs. It is
// finite if all their numbers are. Waits for no GPU.
at::Tensor finite_sum(const std::vector<at::Tensor>& tensors, const c10::Device& device);

std::vector<at::Tensor> gradients_of(const std::vector<at::Tensor>& parameters);

}  // namespace lockstep
