#include "graph_skip.hpp"

#include <ATen/TensorOperators.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>

namespace lockstep {

GraphSkip::GraphSkip(at::Tensor mark, at::Tensor loss)
    : mark_(std::move(mark)), loss_(std::move(loss)), bad_loss_(at::zeros_like(loss_)) {}

void GraphSkip::begin(std::vector<at::Tensor> tensors) {
  const c10::NoGradGuard no_grad;
  mark_.zero_();
  tensors.push_back(loss_);
  for (const auto& tensor : tensors) before_.emplace_back(tensor, tensor.clone());
}

void GraphSkip::end() {
  const c10::NoGradGuard no_grad;
  const at::Tensor is_bad = mark_[0] > 0;
  bad_loss_.copy_(at::where(is_bad, loss_, bad_loss_));
  for (auto& [tensor, before] : std::exchange(before_, {})) tensor.copy_(at::where(is_bad, before, tensor));
}

}  // namespace lockstep
