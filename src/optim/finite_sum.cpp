#include "finite_sum.hpp"

#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include "real_values.hpp"

namespace lockstep {

at::Tensor finite_sum(const std::vector<at::Tensor>& tensors, const c10::Device& device) {
  const c10::NoGradGuard no_grad;
  std::vector<at::Tensor> all;
  for (const auto& tensor : tensors) {
    if (tensor.defined()) all.push_back(real_values(tensor.layout() == at::kStrided ? tensor : tensor._values()));
  }
  at::Tensor sum = at::zeros({}, at::TensorOptions(device).dtype(at::kDouble));
  if (all.empty()) return sum;
  // On a GPU these are a few launches for all tensors; on the CPU they would be calls one by one as well.
  if (!device.is_cpu()) return at::stack(at::_foreach_norm(all, /*ord=*/1, at::kDouble)).sum();
  for (const auto& values : all) {
    const bool narrow = values.scalar_type() == at::kHalf;  // of which a few make more than it can hold
    sum.add_(narrow ? values.sum(at::kFloat) : values.sum());
  }
  return sum;
}

std::vector<at::Tensor> gradients_of(const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> gradients;
  for (const auto& parameter : parameters) gradients.push_back(parameter.grad());
  return gradients;
}

}  // namespace lockstep
