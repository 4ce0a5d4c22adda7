// The options of an optimizer's groups (learning rate, weight decay, …) as text, and back: for checkpoints, and for
// ranks that compare theirs. Pure functions; thread-safe for different optimizers.
#pragma once

#include <torch/optim/optimizer.h>

#include <string>

namespace lockstep {

// JSON, an object for each group: [{"betas": [0.9, 0.999], "kind": "torch::optim::AdamOptions", "lr": 0.001, …}].
// Options that LibTorch cannot save, or that are no numbers, are not in it.
std::string options_text(const torch::optim::Optimizer& optimizer);

// Sets the options to what options_text() gave. Throws Error, and leaves the optimizer as it was, for another number of
// groups, or for the options of another kind of optimizer.
void load_options(torch::optim::Optimizer& optimizer, const std::string& text);

}  // namespace lockstep
