// Checks the results of a user's functions: groups of parameters, and an optimizer of them.
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

// Throws Error, which begins with `who`, unless each parameter that needs a gradient is in one of the groups, and once.
// Tensors that need no gradient may be in the groups too.
void check_groups(const std::vector<torch::optim::OptimizerParamGroup>& groups, const io::NamedTensors& parameters,
                  const std::string& who);

// Returns the optimizer. Throws Error, which begins with `who`, if the optimizer is null, or if its tensors are not the
// given ones. `what` is the name of the given tensors in the error: "slices", "parameters".
std::unique_ptr<torch::optim::Optimizer> checked_optimizer(std::unique_ptr<torch::optim::Optimizer> optimizer,
                                                           const std::vector<at::Tensor>& given, const std::string& who,
                                                           const std::string& what);

}  // namespace lockstep
