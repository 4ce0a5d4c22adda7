// Looks at averaged gradients before an Optimizer steps: takes the norm, clips, and tells whether they are finite. The
// gradients may lie in slices, or in parts of a network. Equal gradients give a norm of the same bits in each layout.
//
// Use it from the rank's thread only. Call each function on all ranks.
#pragma once

#include <ATen/core/Tensor.h>

#include "trained_net.hpp"

#include <string>
#include <utility>
#include <vector>

namespace lockstep {

// Gives the averaged gradients that this rank has, by the parameters' names. Throws Error if the net is sharded and
// nothing was averaged.
std::vector<std::pair<std::string, at::Tensor>> averaged_gradients_of(Replica& replica);

// Scales the gradients so that their norm is at most max_norm (Pascanu et al. 2013). Returns the norm before, a float64
// on the rank's device. Nothing waits for a GPU. Cost: three passes over this rank's gradients, and two exchanges of a
// few numbers where ranks have different parts.
at::Tensor clip_gradients(TrainedNet& net, double max_norm);

// Gives false if some rank's averaged_gradients_of() has a number that is not finite. A sum beyond its type's range
// counts as infinite. Cost: one pass, and an allreduce of one number over each axis. The host waits for a GPU.
bool has_finite_gradients(TrainedNet& net);

}  // namespace lockstep
