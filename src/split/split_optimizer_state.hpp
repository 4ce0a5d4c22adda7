// Converts the state of the optimizers of a SplitModel's ranks to the whole network's state, and back. So a checkpoint
// does not depend on the split.
//
// Each rank knows where its tensors belong. A stage's parameters have the network's names, and a layer that is split by
// channels knows the dimension of its slices. So the slices are joined over the tensor axis, and the stages shared over
// the pipeline axis.
#pragma once

#include <torch/nn/modules/container/sequential.h>
#include <lockstep/split/mesh.hpp>

#include "io/safetensors.hpp"

namespace lockstep {

// Joins the ranks' states to the whole network's, on every rank. `layers` are this rank's layers of the network. Call
// it on all ranks. It costs nothing where the network is split by data alone, and elsewhere the state's bytes over the
// pipeline and tensor axes. Throws Error if the state of a sliced parameter is neither a number nor of the slice's
// shape.
io::NamedTensors joined_state(io::NamedTensors state, const torch::nn::Sequential& layers, Mesh& mesh);

// Gives the state of this rank's layers out of the whole network's, which may come from another split. Call it on all
// ranks. Throws Error for the state of a parameter that no rank has, or of another shape.
io::NamedTensors held_state(io::NamedTensors state, const torch::nn::Sequential& layers, Mesh& mesh);

}  // namespace lockstep
