#include "rules.hpp"

#include <ATen/core/Tensor.h>

#include <string>

namespace simulated {
namespace {

using Values = std::vector<c10::IValue>;

bool is_there(const c10::IValue& value) {
  return value.isTensor() && value.toTensor().defined();
}

// Normalization.cu: one kernel gives all gradients. Where x's is not wanted, or channels come last, another gives the
// sums over dy. It looks at the statistics that were kept, and makes the results like the weight.
void check_batch_norm_backward(const Values& given) {
  const auto wanted = given[9].toBoolList();
  const auto& x = given[1].toTensor();
  const bool channels_last = x.is_contiguous(at::MemoryFormat::ChannelsLast) || x.dim() == 2;
  if (wanted[0] && !channels_last) return;
  TORCH_INTERNAL_ASSERT(is_there(given[5]), "save_mean should always be defined");
  TORCH_INTERNAL_ASSERT(is_there(given[6]), "save_invstd should always be defined");
  if (is_there(given[2]) || !(wanted[1] || wanted[2])) return;
  TORCH_CHECK(channels_last, "tensor does not have a device");
  TORCH_CHECK(false, "native_batch_norm_backward gives gradients of size 0 for an undefined weight");
}

// ForeachUtils.h: one kernel for all tensors takes those that lie in memory in the same way.
void check_fused_optimizer(const Values& given) {
  const auto parameters = given[0].toTensorVector();
  for (size_t list = 1; list < given.size() && given[list].isTensorList(); ++list) {
    const auto tensors = given[list].toTensorVector();
    const bool one_each = tensors.size() == parameters.size();
    for (size_t i = 0; one_each && i < tensors.size(); ++i) {
      if (tensors[i].dim() == 0) continue;  // the number of steps
      TORCH_CHECK(tensors[i].scalar_type() == parameters[i].scalar_type() &&
                      tensors[i].sizes() == parameters[i].sizes() && tensors[i].strides() == parameters[i].strides() &&
                      tensors[i].is_non_overlapping_and_dense(),
                  "check_fast_path_restrictions: a fused optimizer's tensors lie in memory in different ways");
    }
  }
}

// BatchLinearAlgebra.cu has no kernel for numbers of 16 bits.
void check_qr(const Values& given) {
  const auto type = given[0].toTensor().scalar_type();
  TORCH_CHECK(type != at::kHalf && type != at::kBFloat16, "\"geqrf_cuda\" not implemented for ", type);
}

}  // namespace

void check_rules(const c10::FunctionSchema& schema, const Values& given) {
  const std::string& name = schema.name();
  if (name == "aten::native_batch_norm_backward") check_batch_norm_backward(given);
  if (name == "aten::_fused_sgd_" || name == "aten::_fused_adam_" || name == "aten::_fused_adamw_") {
    check_fused_optimizer(given);
  }
  if (name == "aten::linalg_qr") check_qr(given);
}

}  // namespace simulated
