// Makes views of tensors in flat memory, for code that exchanges many tensors as one.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace lockstep {

// Gives a view of `flat` at `offset` for a tensor like `tensor`, with its strides, which autograd prefers for a
// gradient. variable_data() makes it no view for autograd: zero_grad() could not call detach_() of such a view.
at::Tensor view_in_flat(const at::Tensor& tensor, const at::Tensor& flat, int64_t offset);

// flat_copy copies the tensors' values, one after the other, each in the order of its rows. parts_like gives views of
// such a flat tensor, in the tensors' shapes.
at::Tensor flat_copy(const std::vector<at::Tensor>& tensors);
std::vector<at::Tensor> parts_like(const std::vector<at::Tensor>& tensors, const at::Tensor& flat);

// Tells whether both are the same values at the same addresses.
bool same_memory(const at::Tensor& a, const at::Tensor& b);

// Tells whether both have the same values; NaN equals NaN. On a GPU the host waits.
bool same_values(const at::Tensor& a, const at::Tensor& b);

}  // namespace lockstep
