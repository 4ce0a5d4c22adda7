// Computes gradients that can be differentiated again, for kernels with a gradient of their own (create_graph).
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/autograd.h>

#include <cstddef>

namespace lockstep {

// The gradients of `inputs`, if LibTorch's operators have computed y of them. An input that needs none gets undefined.
inline torch::autograd::variable_list differentiable_gradients(const at::Tensor& y, const at::Tensor& grad,
                                                               const torch::autograd::variable_list& inputs) {
  torch::autograd::variable_list needed, gradients(inputs.size());
  for (const at::Tensor& input : inputs) {
    if (input.requires_grad()) needed.push_back(input);
  }
  if (needed.empty()) return gradients;
  const auto found = torch::autograd::grad({y}, needed, {grad}, /*retain_graph=*/true, /*create_graph=*/true);
  for (size_t i = 0, next = 0; i < inputs.size(); ++i) {
    if (inputs[i].requires_grad()) gradients[i] = found[next++];
  }
  return gradients;
}

}  // namespace lockstep
