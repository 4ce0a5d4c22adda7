#include "flat_view.hpp"

namespace lockstep {

at::Tensor view_in_flat(const at::Tensor& tensor, const at::Tensor& flat, int64_t offset) {
  const at::Tensor part = flat.narrow(0, offset, tensor.numel());
  const bool dense = tensor.is_non_overlapping_and_dense();
  return (dense ? part.as_strided(tensor.sizes(), tensor.strides()) : part.view(tensor.sizes())).variable_data();
}

bool same_memory(const at::Tensor& a, const at::Tensor& b) {
  return a.const_data_ptr() == b.const_data_ptr() && a.sizes() == b.sizes() && a.strides() == b.strides() &&
         a.scalar_type() == b.scalar_type();
}

}  // namespace lockstep
