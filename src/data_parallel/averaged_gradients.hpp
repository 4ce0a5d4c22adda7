// What an Optimizer does with averaged gradients before it steps: their norm, clipping, and whether they are finite.
// The gradients may lie in slices, or in parts of a network; equal gradients give a norm of the same bits wherever they
// lie.
//
// Used by the rank's thread only. All ranks must call each function.
#pragma once

#include <ATen/core/Tensor.h>

#include "trained_net.hpp"

#include <string>
#include <utility>
#include <vector>

namespace lockstep {

// What this rank has of them, by the parameters' names. Throws Error if the net is sharded and nothing was averaged.
std::vector<std::pair<std::string, at::Tensor>> averaged_gradients_of(Replica& replica);

// Scales them so that their norm is at most max_norm (Pascanu et al. 2013). Returns the norm before, a float64 on the
// rank's device. Nothing waits for a GPU. Cost: three passes over what this rank has, and two exchanges of a few
// numbers where ranks have different parts.
at::Tensor clip_gradients(TrainedNet& net, double max_norm);

// False if some rank has a number that is not finite in what averaged_gradients_of() gives. A sum beyond its type's
// range counts as infinite. Cost: one pass, and an allreduce of one number over each axis. On a
// GPU it waits for the gradients.
bool has_finite_gradients(TrainedNet& net);

}  // namespace lockstep
