// Views of tensors in flat memory, for what exchanges many tensors as one.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace lockstep {

// The place of a tensor like `tensor` in `flat`, with the strides that autograd likes a gradient to have: those of the
// parameter. variable_data: the same memory, but no view in autograd's eyes, whose detach_() an optimizer's zero_grad()
// could not do.
at::Tensor view_in_flat(const at::Tensor& tensor, const at::Tensor& flat, int64_t offset);

// A copy of the tensors' values, one after the other, each in the order of its rows whatever its strides; and views of
// such a flat tensor, in the tensors' shapes.
at::Tensor flat_copy(const std::vector<at::Tensor>& tensors);
std::vector<at::Tensor> parts_like(const std::vector<at::Tensor>& tensors, const at::Tensor& flat);

// Whether both are the same values at the same addresses.
bool same_memory(const at::Tensor& a, const at::Tensor& b);

// Whether both have the same values, NaN where the other has NaN. On a GPU the host waits.
bool same_values(const at::Tensor& a, const at::Tensor& b);

}  // namespace lockstep
