// Reads and sets the state of a torch::optim optimizer (momentum, Adam's averages, step counts), as named tensors, and
// the options of its groups (learning rate, weight decay, …), as text.
//
// The state works for every optimizer that has LibTorch's save() and load(), through the members that its states
// serialise. The name "momentum_buffer.conv1.weight" means the member momentum_buffer of the state of the parameter
// conv1.weight. Integers and floating point numbers are int64 and float64 tensors without dimensions.
#pragma once

#include <torch/optim/optimizer.h>

#include "io/safetensors.hpp"

#include <string>
#include <utility>

namespace lockstep {

// Gives the state of these parameters, under these names, copied to the parameters' device. Throws Error for an
// optimizer whose state cannot be saved, or for a member of another type.
io::NamedTensors optimizer_state(const torch::optim::Optimizer& optimizer, const io::NamedTensors& parameters);

// Gives the member and the parameter in the name of a state: "exp_avg" and "fc1.weight". Throws Error for another name.
std::pair<std::string, std::string> parts_of_state_name(const std::string& name);

// Replaces the optimizer's state. Tensors go to the parameters' device. A tensor of its parameter's shape gets the
// parameter's strides. Throws Error for the state of a missing parameter, another shape, or the state of another kind
// of optimizer, and leaves the optimizer as it was.
void load_optimizer_state(torch::optim::Optimizer& optimizer, const io::NamedTensors& parameters,
                          const io::NamedTensors& state);

// Gives the options as JSON, for checkpoints, and for ranks that compare theirs. There is an object for each group:
// [{"betas": [0.9, 0.999], "kind": "torch::optim::AdamOptions", "lr": 0.001, …}]. Options that LibTorch
// cannot save, or that are no numbers, are left out. Thread-safe for different optimizers, as load_options() is.
std::string options_text(const torch::optim::Optimizer& optimizer);

// Sets the options to what options_text() gave. Throws Error for another number of groups, or for the options of
// another kind of optimizer, and leaves the optimizer as it was.
void load_options(torch::optim::Optimizer& optimizer, const std::string& text);

}  // namespace lockstep
