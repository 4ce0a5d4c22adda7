// Averages the ranks' gradients over all grains of a batch, in the order of additions of grain_tree.hpp alone.
//
// Ranks of one process read each other's sums, in one call. Between processes all goes through the backend's alltoall,
// which all backends have, and in which nothing is added.
#pragma once

#include <ATen/core/Tensor.h>
#include <lockstep/data_parallel/communication_hook.hpp>
#include <lockstep/ranks/rank.hpp>

#include <vector>

#include "part_sizes.hpp"

namespace lockstep {

// Begins to average. `rows` are what GrainSums::rows() gave, and change. They have as many columns as there are ranks
// times a slice's. `target` becomes the average, or if `in_slices` this rank's slice of it. The first row may be the
// target. Call it on all ranks, and make the round's next calls in one order. The sum of the grains' gradients is
// divided by the batch's samples. Then +0 is added, so that parameters without a gradient get +0.
CommunicationHook::Round post_grain_average(Rank& rank, const std::vector<at::Tensor>& rows, const GrainPlan& plan,
                                            const at::Tensor& target, bool in_slices);

}  // namespace lockstep
