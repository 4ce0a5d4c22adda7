// A function as a layer, and a copy that is a rank's own, for tests of nets of layers.
#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/modules/container/sequential.h>
#include <lockstep/devices/devices.hpp>

#include "test_devices.hpp"

#include <cstddef>
#include <functional>
#include <memory>
#include <utility>

namespace lockstep {

// A function as a layer.
struct LambdaImpl : torch::nn::Cloneable<LambdaImpl> {
  using Function = std::function<torch::Tensor(const torch::Tensor&)>;
  explicit LambdaImpl(Function function) : function_(std::move(function)) {}
  void reset() override {}
  torch::Tensor forward(const torch::Tensor& x) { return function_(x); }
  Function function_;
};
TORCH_MODULE(Lambda);

// A net with the same weights, layer by layer under the same names: every rank has layers of its own.
inline torch::nn::Sequential copy_of(const torch::nn::Sequential& net) {
  torch::nn::Sequential copy;
  size_t i = 0;
  for (const auto& item : net->named_children()) {
    copy->push_back(item.key(), (net->begin() + static_cast<std::ptrdiff_t>(i++))->clone());
  }
  copy->train(net->is_training());
  return copy;
}

}  // namespace lockstep
