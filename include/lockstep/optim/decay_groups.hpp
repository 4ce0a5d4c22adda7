// decay_groups: makes two groups of an optimizer: the parameters that weight decay suits, and the others.
//
// Thread-safe for different modules.
#pragma once

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <vector>

namespace lockstep {

// Puts a module's parameters into two groups, each once. Group 0 has those of two or more dimensions, which weight
// decay suits. Group 1 has biases and the weights of norms. To spare group 1 the decay:
//   lockstep::Optimizer adamw(net, torch::optim::AdamWOptions(1e-3).weight_decay(0.1), lockstep::decay_groups);
//   lockstep::Optimizer::set_weight_decay(adamw.param_groups()[1], 0);
std::vector<torch::optim::OptimizerParamGroup> decay_groups(const torch::nn::Module& module);

}  // namespace lockstep
