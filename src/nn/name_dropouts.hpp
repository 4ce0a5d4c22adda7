// name_dropouts: names the Dropout layers of a network, so that masks follow from their names.
#pragma once

#include <torch/nn/module.h>

namespace lockstep {

// Gives every Dropout in `module` its name there. DataParallel, SplitModel and ParameterServer call this.
void name_dropouts(torch::nn::Module& module);

}  // namespace lockstep
