// These functions find the layers of a network that draw random numbers in training: LibTorch's, and lockstep's
// Dropout. Layers of a user's own are not checked.
#pragma once

#include <torch/nn/module.h>

#include <string>

namespace lockstep {

// Gives the name of LibTorch's first such layer in `module`, or "" if there is none.
std::string first_random_layer(const torch::nn::Module& module);

// Gives every Dropout in `module` its name there, so that masks follow from the names. DataParallel, SplitModel and
// ParameterServer call this.
void name_dropouts(torch::nn::Module& module);

}  // namespace lockstep
