#include "flat_view.hpp"

#include <ATen/ops/allclose.h>
#include <ATen/ops/cat.h>

namespace lockstep {

at::Tensor view_in_flat(const at::Tensor& tensor, const at::Tensor& flat, int64_t offset) {
  const at::Tensor part = flat.narrow(0, offset, tensor.numel());
  const bool dense = tensor.is_non_overlapping_and_dense();
  return (dense ? part.as_strided(tensor.sizes(), tensor.strides()) : part.view(tensor.sizes())).variable_data();
}

at::Tensor flat_copy(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> flat;
  for (const auto& tensor : tensors) flat.push_back(tensor.detach().flatten());
  return at::cat(flat);
}

std::vector<at::Tensor> parts_like(const std::vector<at::Tensor>& tensors, const at::Tensor& flat) {
  std::vector<at::Tensor> parts;
  int64_t offset = 0;
  for (const auto& tensor : tensors) {
    parts.push_back(flat.narrow(0, offset, tensor.numel()).view(tensor.sizes()));
    offset += tensor.numel();
  }
  return parts;
}

bool same_memory(const at::Tensor& a, const at::Tensor& b) {
  return a.const_data_ptr() == b.const_data_ptr() && a.sizes() == b.sizes() && a.strides() == b.strides() &&
         a.scalar_type() == b.scalar_type();
}

bool same_values(const at::Tensor& a, const at::Tensor& b) {
  return at::allclose(a, b, 0, 0, /*equal_nan=*/true);
}

}  // namespace lockstep
