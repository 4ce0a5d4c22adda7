#include "finite_sum.hpp"

#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/stack.h>
#include <c10/core/GradMode.h>

#include <map>
#include <utility>

namespace lockstep {
namespace {

std::vector<at::Tensor> values_of(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> all;
  for (const auto& tensor : tensors) {
    if (tensor.defined()) all.push_back(real_values(tensor.layout() == at::kStrided ? tensor : tensor._values()));
  }
  return all;
}

}  // namespace

at::Tensor finite_sum(const std::vector<at::Tensor>& tensors, const c10::Device& device) {
  const c10::NoGradGuard no_grad;
  const std::vector<at::Tensor> all = values_of(tensors);
  // A GPU needs a few launches for all tensors. On the CPU these functions, too, would be one call per tensor.
  if (!device.is_cpu() && !all.empty()) return at::stack(at::_foreach_norm(all, /*ord=*/1, at::kDouble)).sum();
  double sum = 0;
  for (const auto& values : all) {
    const bool narrow = values.scalar_type() == at::kHalf;  // a sum of few of them may exceed the type's largest number
    sum += (narrow ? values.sum(at::kFloat) : values.sum()).item<double>();
  }
  return at::scalar_tensor(sum, at::TensorOptions(device).dtype(at::kDouble));
}

// Each type has a call of its own, as the operator wants.
void find_not_finite(const std::vector<at::Tensor>& tensors, at::Tensor found, const at::Tensor& one) {
  const c10::NoGradGuard no_grad;
  std::map<at::ScalarType, std::vector<at::Tensor>> of_types;
  for (auto& values : values_of(tensors)) of_types[values.scalar_type()].push_back(std::move(values));
  for (const auto& [type, values] : of_types) at::_amp_foreach_non_finite_check_and_unscale_(values, found, one);
}

}  // namespace lockstep
