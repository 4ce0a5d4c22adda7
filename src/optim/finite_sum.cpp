#include "finite_sum.hpp"

#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

namespace lockstep {

at::Tensor finite_sum(const std::vector<at::Tensor>& tensors, const c10::Device& device) {
  const c10::NoGradGuard no_grad;
  std::vector<at::Tensor> all;
  for (const auto& tensor : tensors) {
    if (tensor.defined()) all.push_back(real_values(tensor.layout() == at::kStrided ? tensor : tensor._values()));
  }
  at::Tensor sum = at::zeros({}, at::TensorOptions(device).dtype(at::kDouble));
  if (all.empty()) return sum;
  // A GPU needs a few launches for all tensors. On the CPU these functions, too, would be one call per tensor.
  if (!device.is_cpu()) return at::stack(at::_foreach_norm(all, /*ord=*/1, at::kDouble)).sum();
  for (const auto& values : all) {
    const bool narrow = values.scalar_type() == at::kHalf;  // a sum of few of them may exceed the type's largest number
    sum.add_(narrow ? values.sum(at::kFloat) : values.sum());
  }
  return sum;
}

}  // namespace lockstep
