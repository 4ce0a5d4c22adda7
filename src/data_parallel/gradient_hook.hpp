// GradientHook: calls a function each time that autograd has added to a parameter's gradient.
//
// It runs on the thread that computes. On GPUs that is autograd's thread of the device, with the gradient's stream
// current.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <cstdint>
#include <functional>
#include <utility>

namespace lockstep {

class GradientHook {
 public:
  // Give it a parameter that needs a gradient.
  GradientHook(const at::Tensor& parameter, std::function<void()> function);
  ~GradientHook();                                         // takes the hook off again: the parameter may live on
  static bool is_behind(const at::TensorImpl& parameter);  // tells whether the parameter has a hook
  GradientHook& operator=(GradientHook&&) = delete;

 private:
  // 2.11 has a std::shared_ptr here, 2.15 an intrusive one.
  using Accumulator = decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));

  const Accumulator accumulator_;  // kept alive: autograd holds it only as long as a graph has that need
  const uintptr_t key_;
};

}  // namespace lockstep
