#include "hidden_gradients.hpp"

#include <c10/core/GradMode.h>

#include <utility>

namespace lockstep {

HiddenGradients::HiddenGradients(const torch::nn::Module& module)
    : parameters_(module.parameters()), gradients_(parameters_.size()) {
  hide();
}

void HiddenGradients::hide() {
  for (size_t i = 0; i < parameters_.size(); ++i)
    gradients_[i] = std::exchange(parameters_[i].mutable_grad(), at::Tensor());
}

HiddenGradients::Shown::Shown(HiddenGradients* hidden) : hidden_(hidden) {
  if (hidden_ == nullptr || hidden_->shown_++ > 0) return;
  const c10::NoGradGuard no_grad;
  for (size_t i = 0; i < hidden_->parameters_.size(); ++i) {
    at::Tensor& gradient = hidden_->parameters_[i].mutable_grad();
    at::Tensor was_hidden = std::exchange(hidden_->gradients_[i], at::Tensor());
    if (!was_hidden.defined()) continue;
    if (gradient.defined()) was_hidden.add_(gradient);  // a backward outside of the net's added to it
    gradient = std::move(was_hidden);
  }
}

HiddenGradients::Shown::~Shown() {
  if (hidden_ != nullptr && --hidden_->shown_ == 0) hidden_->hide();
}

}  // namespace lockstep
