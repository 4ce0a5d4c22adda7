// SampleFunction: holds a loss or a metric. It takes the network's output, and either the targets or the whole batch.
//
// Give it (y_hat, y), or (y_hat, batch) if it needs a mask or another tensor of the batch. It is as thread-safe as the
// function.
#pragma once

#include <ATen/core/Tensor.h>
#include <lockstep/data/data.hpp>

#include <concepts>
#include <cstddef>
#include <functional>
#include <typeinfo>
#include <utility>

namespace lockstep::detail {

template <class Function>
concept OfSamples = std::invocable<Function&, const at::Tensor&, const at::Tensor&> ||
    std::invocable<Function&, const at::Tensor&, const Batch&>;

template <class Function>
inline constexpr bool kMayBeEmpty = false;
template <class Signature>
inline constexpr bool kMayBeEmpty<std::function<Signature>> = true;

class SampleFunction {
 public:
  SampleFunction() = default;  // holds no function
  SampleFunction(std::nullptr_t) {}
  template <OfSamples Function>
  SampleFunction(Function function) {
    if constexpr (kMayBeEmpty<Function>) {
      if (!function) return;
    }
    if constexpr (std::invocable<Function&, const at::Tensor&, const at::Tensor&>) {
      function_ = [function = std::move(function)](const at::Tensor& y_hat, const Batch& batch) mutable -> at::Tensor {
        return function(y_hat, batch.y);
      };
    } else {
      function_ = std::move(function);
    }
  }

  explicit operator bool() const { return static_cast<bool>(function_); }
  // Tells functions of different types apart.
  const std::type_info& type() const { return function_.target_type(); }
  at::Tensor operator()(const at::Tensor& y_hat, const Batch& batch) const { return function_(y_hat, batch); }
  // Calls the function with a batch that has only y.
  at::Tensor operator()(const at::Tensor& y_hat, const at::Tensor& y) const {
    return function_(y_hat, {.x = {}, .y = y});
  }

 private:
  std::function<at::Tensor(const at::Tensor& y_hat, const Batch& batch)> function_;
};

// Says that a module's forward takes a whole batch: at::Tensor forward(const lockstep::Batch& batch).
template <class Module>
concept TakesBatch = requires {
  requires std::is_invocable_v<decltype(&Module::forward), Module&, const Batch&>;
};

// Gives the argument for a module's forward: the batch if forward takes one, else the batch's x.
template <class Module>
decltype(auto) input_of(const Batch& batch) {
  if constexpr (TakesBatch<Module>) {
    return (batch);
  } else {
    return (batch.x);
  }
}

}  // namespace lockstep::detail
