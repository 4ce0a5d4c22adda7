#include "hidden_gradients.hpp"

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
  for (size_t i = 0; i < hidden_->parameters_.size(); ++i)
    hidden_->parameters_[i].mutable_grad() = std::exchange(hidden_->gradients_[i], at::Tensor());
}

HiddenGradients::Shown::~Shown() {
  if (hidden_ != nullptr && --hidden_->shown_ == 0) hidden_->hide();
}

}  // namespace lockstep
