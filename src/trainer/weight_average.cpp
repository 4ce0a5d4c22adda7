#include "weight_average.hpp"

#include <ATen/TensorOperators.h>
#include <c10/core/GradMode.h>

#include <set>
#include <utility>

namespace lockstep {

WeightAverage::WeightAverage(double decay, std::vector<at::Tensor> weights)
    : decay_(decay), weights_(std::move(weights)) {
  std::set<const c10::TensorImpl*> seen;
  for (const auto& tensor : weights_) comes_again_.push_back(!seen.insert(tensor.unsafeGetTensorImpl()).second);
}

void WeightAverage::add() {
  if (!is_begun()) return set(weights_);
  const c10::NoGradGuard no_grad;
  for (size_t i = 0; i < weights_.size(); ++i) average_[i].mul_(decay_).add_(weights_[i] * (1 - decay_));
}

void WeightAverage::set(const std::vector<at::Tensor>& values) {
  begun_ = true;
  average_.clear();
  for (const auto& value : values) average_.push_back(value.detach().clone());
}

void WeightAverage::exchange() {
  const c10::NoGradGuard no_grad;
  for (size_t i = 0; i < average_.size(); ++i) {
    if (comes_again_[i]) continue;
    const at::Tensor weights = weights_[i].detach().clone();
    weights_[i].copy_(average_[i]);
    average_[i].copy_(weights);
  }
}

}  // namespace lockstep
