// make_modules_equal: gives all ranks replicas of one module, for every way of training that starts from such replicas.
#pragma once

#include <torch/nn/module.h>
#include <lockstep/ranks/rank.hpp>

#include <string>

namespace lockstep {

// Moves `module` to the rank's device and copies rank 0's parameters and buffers to all ranks. Call it on all ranks;
// errors name `user`. Throws Error on every rank if the ranks' modules differ in their number of tensors, a name, a
// shape or a type, or share memory.
void make_modules_equal(torch::nn::Module& module, Rank& rank, const std::string& user);

}  // namespace lockstep
