// Layers with kernels of lockstep's own share this: what the kernels can read, and gradients of gradients.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/autograd.h>

#include <cstddef>
#include <vector>

namespace lockstep {

// Whether the tensor is float32 in the CPU's memory, as it stands there.
inline bool is_plain_float(const at::Tensor& tensor) {
  return tensor.is_cpu() && tensor.scalar_type() == at::kFloat && tensor.layout() == at::kStrided && !tensor.is_neg();
}

// The inputs of a scope. The kernels read parameters by their addresses, which MemoryOnDemand learns before from these.
inline std::vector<c10::IValue> read_by_kernels(std::vector<c10::IValue> parameters) {
  return parameters;
}

// The gradients of `inputs`, if LibTorch's operators have computed y of them (create_graph). They can be differentiated
// again. An input that needs none gets undefined.
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
