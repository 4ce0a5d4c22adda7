// What copies of modules take over that clone() leaves out. The copies: whole_copy() in parallel_layers.hpp.
#pragma once

#include <torch/nn/module.h>

namespace lockstep {

// Which parameters are frozen, and the mode.
void take_over_flags(const torch::nn::Module& from, torch::nn::Module& to);

}  // namespace lockstep
