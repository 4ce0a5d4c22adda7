// nn: what a network needs in a run: its weights in files, and masks that do not depend on the ranks.
//   dropout       dropout with the same masks on any number of ranks
//   sample_scope  tells layers which samples this thread computes
//   weights       a module's weights as a safetensors file
// Not in lockstep.hpp:
//   layer_holder  modules of your own whose BatchNorms can be replaced
//   tensor_files  any tensors by name as a file, and a network's hash
#pragma once

#include <lockstep/nn/dropout.hpp>
#include <lockstep/nn/sample_scope.hpp>
#include <lockstep/nn/weights.hpp>
