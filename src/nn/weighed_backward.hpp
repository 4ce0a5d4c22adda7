// WeighedBackward: multiplies the gradients of a loss's backward by `weight`, whatever the loss's type is.
//
// Backward begins with the weight, which autograd rounds to the loss's type: bfloat16 makes 1.3359375 of 4/3, and
// float16 infinity of 70000. If this would change the weight, backward begins with 1. Then each whole gradient is
// weighed in its own type, before the addition to .grad. Backward always begins with the weight if the loss has 32 bits
// or more.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>

#include <optional>
#include <utility>
#include <vector>

namespace lockstep {

class WeighedBackward {
 public:
  // While a WeighedBackward lives, a backward that begins at `loss` with seed() multiplies gradients by `weight`: those
  // of the module's parameters, and of all other leaves of the loss's graph.
  WeighedBackward(const at::Tensor& loss, double weight, const torch::nn::Module& module);
  ~WeighedBackward();
  WeighedBackward& operator=(WeighedBackward&&) = delete;

  const at::Tensor& seed() const { return seed_; }
  bool weighs_gradients() const { return rest_.has_value(); }  // false: the seed weighs them
  // Weighs a gradient that torch::autograd::grad() gives, since the hooks do not weigh it.
  at::Tensor weighed(const at::Tensor& gradient) const { return rest_ ? gradient * *rest_ : gradient; }

 private:
  using Accumulator = decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));

  at::Tensor seed_;
  std::optional<double> rest_;  // the weight that the seed leaves to the gradients
  std::vector<std::pair<Accumulator, const torch::autograd::FunctionPreHook*>> hooks_;
};

}  // namespace lockstep
