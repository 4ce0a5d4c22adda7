// Puts together the state of an optimizer of which each rank has slices, and takes it apart.
#pragma once

#include <torch/optim/optimizer.h>
#include <lockstep/ranks/rank.hpp>

#include <vector>

#include "io/safetensors.hpp"
#include "replica_check.hpp"
#include "sharded_parameters.hpp"

namespace lockstep {

// Gives the state as optimizer_state() does for an optimizer of whole parameters. Call it on all ranks.
io::NamedTensors whole_state(const torch::optim::Optimizer& optimizer, const std::vector<ShardedBucket>& buckets,
                             Rank& rank);

// Throws Error as load_optimizer_state() does.
void load_slices_of_state(torch::optim::Optimizer& optimizer, const std::vector<ShardedBucket>& buckets,
                          const io::NamedTensors& state);

// Gives tensors for a MemoryWatch: this rank's slices of that state, and if asked for those of the parameters, with the
// parameters' versions.
std::vector<WatchedTensor> watched_slices(const torch::optim::Optimizer& optimizer,
                                          const std::vector<ShardedBucket>& buckets, bool with_parameters);

}  // namespace lockstep
