// Views of tensors in flat memory, for what exchanges many tensors as one.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace lockstep {

// The place of a tensor like `tensor` in `flat`, with the strides that autograd likes a gradient to have: those of the
// parameter. variable_data: the same memory, but no view in autograd's eyes, whose detach_() an optimizer's zero_grad()
// could not do.
at::Tensor view_in_flat(const at::Tensor& tensor, const at::Tensor& flat, int64_t offset);

// Whether both are the same values at the same addresses.
bool same_memory(const at::Tensor& a, const at::Tensor& b);

}  // namespace lockstep
