#include "fused_sgd.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_zero.h>
#include <ATen/ops/_fused_sgd.h>
#include <lockstep/base/error.hpp>

#include <utility>

namespace lockstep {

FusedSgd::FusedSgd(std::vector<at::Tensor> parameters, double lr) : parameters_(std::move(parameters)), lr_(lr) {
  for (const auto& parameter : parameters_) {
    const auto& first = parameters_[0];
    if (parameter.scalar_type() == first.scalar_type() && parameter.device() == first.device()) continue;
    throw Error("FusedSgd: all parameters must have one type and lie on one device, but one is " +
                std::string(c10::toString(first.scalar_type())) + " on " + first.device().str() + " and another " +
                c10::toString(parameter.scalar_type()) + " on " + parameter.device().str());
  }
}

void FusedSgd::zero_grad() {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> gradients;
  for (const auto& parameter : parameters_) {
    if (parameter.grad().defined()) gradients.push_back(parameter.grad());
  }
  if (!gradients.empty()) at::_foreach_zero_(gradients);
}

void FusedSgd::step() {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> parameters, gradients;
  for (const auto& parameter : parameters_) {
    if (!parameter.grad().defined()) continue;
    parameters.push_back(parameter);
    gradients.push_back(parameter.grad());
  }
  if (parameters.empty()) return;
  at::_fused_sgd_(parameters, gradients, /*momentum_buffer_list=*/{}, /*weight_decay=*/0, /*momentum=*/0, lr_,
                  /*dampening=*/0, /*nesterov=*/false, /*maximize=*/false, /*is_first_step=*/false);
}

}  // namespace lockstep
