// Layers with kernels of lockstep's own share these functions, for the kernels' inputs and for gradients of gradients.
#pragma once

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/autograd.h>

#include "devices/micro_kernel.hpp"

#include <cstddef>
#include <vector>

namespace lockstep {

// Tells whether the tensor is float32 in the CPU's memory, as it stands there. An undefined or nested one is not.
inline bool is_plain_float(const at::Tensor& tensor) {
  return tensor.is_cpu() && tensor.scalar_type() == at::kFloat && tensor.layout() == at::kStrided && !tensor.is_neg() &&
         !tensor.is_nested();
}

// Tells whether lockstep's operators multiply by the micro-kernel or AMX here, and now on this thread.
inline bool takes_micro_kernel() {
  return !at::autocast::is_autocast_enabled(at::kCPU) && at::globalContext().userEnabledMkldnn() && has_micro_kernel();
}

// Gives the inputs of a scope around kernels that read parameters by their addresses. A MemoryFiller learns from them
// which memory to fill before (memory_on_demand.hpp).
inline std::vector<c10::IValue> read_by_kernels(std::vector<c10::IValue> parameters) {
  return parameters;
}

// Gives the gradients of `inputs`, if LibTorch's operators have computed y of them (create_graph). These gradients can
// be differentiated again. An input that needs none gets an undefined tensor.
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
