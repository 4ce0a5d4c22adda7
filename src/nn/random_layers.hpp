// Finds layers of LibTorch that draw random numbers in training. Layers of a user's own are not checked.
#pragma once

#include <torch/nn/module.h>

#include <string>

namespace lockstep {

// Gives the name of the first such layer in `module`, or "" if there is none.
std::string first_random_layer(const torch::nn::Module& module);

}  // namespace lockstep
