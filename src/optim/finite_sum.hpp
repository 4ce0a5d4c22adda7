// finite_sum gives one number that tells whether all numbers of some tensors are finite.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace lockstep {

// The sum over all defined tensors, as float64 on `device`; on a GPU it is a sum of magnitudes. It is finite if all
// numbers are finite. Waits for no GPU.
at::Tensor finite_sum(const std::vector<at::Tensor>& tensors, const c10::Device& device);

}  // namespace lockstep
