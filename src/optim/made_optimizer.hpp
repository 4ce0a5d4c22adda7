// What a user's functions that make groups of parameters, and an optimizer of them, must give.
//
// Pure functions; thread-safe for different optimizers.
#pragma once

#include <torch/optim/optimizer.h>

#include "io/safetensors.hpp"

#include <memory>
#include <string>
#include <vector>

namespace lockstep {

std::vector<at::Tensor> tensors_in(const std::vector<torch::optim::OptimizerParamGroup>& groups);

// Throws Error, which begins with `who`, unless each of the parameters that need a gradient is in one of the groups,
// and once. Tensors that need none may be in there too.
void check_groups(const std::vector<torch::optim::OptimizerParamGroup>& groups, const io::NamedTensors& parameters,
                  const std::string& who);

// The optimizer. Throws Error, which begins with `who`, if there is none, or if its tensors are not those that the
// function was given, which are called `what`: "slices", "parameters".
std::unique_ptr<torch::optim::Optimizer> checked_optimizer(std::unique_ptr<torch::optim::Optimizer> optimizer,
                                                           const std::vector<at::Tensor>& given, const std::string& who,
                                                           const std::string& what);

}  // namespace lockstep
