// Criterion: what makes a network's output and the targets a loss, the mean over the samples.
//
// Any callable (y_hat, y) -> scalar tensor, or one of torch::nn::functional's losses by its name. A value; as
// thread-safe as the callable.
#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <functional>
#include <utility>

namespace lockstep {

class Criterion {
 public:
  template <std::invocable<at::Tensor, at::Tensor> Function>
  Criterion(Function function) : function_(std::move(function)) {}
  template <class Options>
  Criterion(at::Tensor (*function)(const at::Tensor&, const at::Tensor&, const Options&))
      : function_([function](const at::Tensor& y_hat, const at::Tensor& y) { return function(y_hat, y, Options{}); }) {}

  at::Tensor operator()(const at::Tensor& y_hat, const at::Tensor& y) const { return function_(y_hat, y); }

 private:
  std::function<at::Tensor(const at::Tensor&, const at::Tensor&)> function_;
};

}  // namespace lockstep
