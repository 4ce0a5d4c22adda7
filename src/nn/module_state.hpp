// Reads and sets a module's parameters and buffers as named tensors.
#pragma once

#include <torch/nn/module.h>
#include <lockstep/nn/weights.hpp>

#include <string>

#include "io/safetensors.hpp"

namespace lockstep {

// Gives parameters, then buffers, as PyTorch's state_dict names them. A tensor that the module holds under two names
// comes once, under the first. The tensors share the module's memory.
io::NamedTensors state_of(const torch::nn::Module& module);

// Copies `values` into `module`. A shared tensor may have any of its names. Throws Error, which begins with `what`,
// before anything is changed, if a name has another shape or type. Throws also if a name is missing or unknown, unless
// `strict` is false. Returns the names that were left out.
UnmatchedNames load_state(const io::NamedTensors& values, torch::nn::Module& module, const std::string& what,
                          bool strict = true);

}  // namespace lockstep
