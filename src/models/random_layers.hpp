// Layers of LibTorch that draw random numbers in training; those of a user's own are not seen through.
#pragma once

#include <torch/nn/module.h>

#include <string>

namespace lockstep {

// The name of the first one in `module`; empty if there is none.
std::string first_random_layer(const torch::nn::Module& module);

}  // namespace lockstep
