// Flags that clone() leaves out, for copies of modules. whole_copy() in parallel_layers.hpp makes the copies.
#pragma once

#include <torch/nn/module.h>

namespace lockstep {

// Takes over which parameters are frozen, and the mode.
void take_over_flags(const torch::nn::Module& from, torch::nn::Module& to);

}  // namespace lockstep
