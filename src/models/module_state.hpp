// A module's parameters and buffers as named tensors, and back.
#pragma once

#include <torch/nn/module.h>

#include <string>

#include "io/safetensors.hpp"

namespace lockstep {

// Parameters, then buffers, as PyTorch's state_dict names them; a tensor that the module holds under two names once,
// under the first. They share the module's memory.
io::NamedTensors state_of(const torch::nn::Module& module);

// Copies `values` into `module`, where a shared tensor may be meant by any of its names. Throws Error that begins with
// `what`, before anything is changed, if a name is missing, unknown, or has another shape or type.
void load_state(const io::NamedTensors& values, torch::nn::Module& module, const std::string& what);

}  // namespace lockstep
