// split_into_stages: cuts a network of layers into the stages of a pipeline.
#pragma once

#include <torch/nn/modules/container/sequential.h>
#include <lockstep/layout/model_split.hpp>

#include <vector>

namespace lockstep {

// Give a split that check_split() takes for the net. The stages share the net's layers under their names, so a
// parameter has the same name as in the net. Put each skip connection inside one layer (a module whose forward adds its
// input). Throws Error for modules that are none of the layers, and for a parameter that two stages would share. A
// layer of a later stage may borrow a parameter: see TiedLinear.
std::vector<torch::nn::Sequential> split_into_stages(const torch::nn::Sequential& net, const ModelSplit& split);

}  // namespace lockstep
