// Lars and Lamb share these functions: for the ratio of norms that scales a layer's update, for groups with options of
// their own, for a step's closure, and for refusals.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/where.h>
#include <torch/optim/optimizer.h>
#include <lockstep/base/error.hpp>

#include <string>
#include <vector>

#include "base/number_text.hpp"

namespace lockstep {

// Gives above / below for scalars on one device, or 1 where `defined_when` is false. Reads nothing back from a GPU.
inline at::Tensor ratio_or_1(const at::Tensor& above, const at::Tensor& below, const at::Tensor& defined_when) {
  return at::where(defined_when, above / below, at::ones_like(above));
}

// Gives groups back the options that they were made with. LibTorch up to 2.11 keeps these options. Later versions merge
// them with the defaults, and optimizers that are not LibTorch's own are left with the defaults alone.
inline void keep_own_options(const std::vector<torch::optim::OptimizerParamGroup>& made_with,
                             std::vector<torch::optim::OptimizerParamGroup>& groups) {
  for (size_t i = 0; i < made_with.size(); ++i) {
    if (made_with[i].has_options()) groups[i].set_options(made_with[i].options().clone());
  }
}

// Gives the result of step(): its closure's loss, computed with gradients, or an undefined tensor without a closure.
inline at::Tensor loss_of(const torch::optim::Optimizer::LossClosure& closure) {
  const at::AutoGradMode with_gradients(true);
  return closure ? closure() : at::Tensor();
}

inline void check_not_negative(const char* optimizer, const char* option, double value) {
  if (value >= 0) return;
  throw Error(std::string(optimizer) + ": " + option + " is " + number_text(value) + "; it must be at least 0");
}

inline void check_dense(const char* optimizer, const at::Tensor& gradient) {
  if (!gradient.is_sparse()) return;
  throw Error(std::string(optimizer) + ": a gradient is sparse, and it takes dense ones only");
}

}  // namespace lockstep
