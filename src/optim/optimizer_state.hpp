// What a torch::optim optimizer remembers of its parameters (momentum, Adam's averages and step counts), as named
// tensors.
//
// It works for every optimizer that has LibTorch's save() and load(), through the members that its states serialise:
// "momentum_buffer.conv1.weight" is the member momentum_buffer of the state of the parameter conv1.weight. Whole
// numbers and floating point ones are int64 and float64 tensors without dimensions. Options (the learning rate, …) are
// no part.
#pragma once

#include <torch/optim/optimizer.h>

#include "io/safetensors.hpp"

namespace lockstep {

// Of these parameters, under these names; copies, on the parameters' device. Throws Error: an optimizer whose state
// cannot be saved, or a member of another type.
io::NamedTensors optimizer_state(const torch::optim::Optimizer& optimizer, const io::NamedTensors& parameters);

// Gives it to the optimizer, in place of what that has; tensors go to the parameters' device, and those of a
// parameter's shape get its strides. Throws Error, with the optimizer as it was: the state of a parameter that is not
// there, another shape, or of another kind of optimizer.
void load_optimizer_state(torch::optim::Optimizer& optimizer, const io::NamedTensors& parameters,
                          const io::NamedTensors& state);

}  // namespace lockstep
