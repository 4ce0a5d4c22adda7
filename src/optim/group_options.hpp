// Turns the options of an optimizer's groups (learning rate, weight decay, …) into text and back: for checkpoints, and
// for ranks that compare theirs. Pure functions; thread-safe for different optimizers.
#pragma once

#include <torch/optim/optimizer.h>

#include <string>

namespace lockstep {

// Gives JSON, an object for each group: [{"betas": [0.9, 0.999], "kind": "torch::optim::AdamOptions", "lr": 0.001, …}].
// It leaves out options that LibTorch cannot save, or that are no numbers.
std::string options_text(const torch::optim::Optimizer& optimizer);

// Sets the options to what options_text() gave. Throws Error for another number of groups, or for the options of
// another kind of optimizer, and leaves the optimizer as it was.
void load_options(torch::optim::Optimizer& optimizer, const std::string& text);

}  // namespace lockstep
