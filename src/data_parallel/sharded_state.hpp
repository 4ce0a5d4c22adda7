// Puts together the state of an optimizer of which each rank has slices, and takes it apart.
#pragma once

#include <torch/optim/optimizer.h>
#include <lockstep/ranks/rank.hpp>

#include <cstdint>
#include <vector>

#include "io/safetensors.hpp"
#include "memory_watch.hpp"
#include "sharded_parameters.hpp"
#include "state_piece.hpp"

namespace lockstep {

class ShardedOptimizer;

// The same as optimizer_state() of such an optimizer of whole parameters. All ranks must call it.
io::NamedTensors whole_state(const torch::optim::Optimizer& optimizer, const std::vector<ShardedBucket>& buckets,
                             Rank& rank);

// Also what this rank keeps for another. Throws Error as load_optimizer_state() does.
void load_slices_of_state(torch::optim::Optimizer& optimizer, const std::vector<ShardedBucket>& buckets,
                          const io::NamedTensors& state);

// A hash of what this rank has of that state, and one of what it keeps for another: that rank has the same as its
// own. Cost: as tensor_hash().
struct SliceHashes {
  int64_t own, kept;
};
SliceHashes slice_hashes(const torch::optim::Optimizer& optimizer, const std::vector<ShardedBucket>& buckets);

// The same tensors for a MemoryWatch; and the pieces of the parameters themselves, with the parameters' versions.
std::vector<WatchedTensor> watched_slices_of_state(const torch::optim::Optimizer& optimizer,
                                                   const std::vector<ShardedBucket>& buckets);
std::vector<WatchedTensor> watched_pieces(const std::vector<ShardedBucket>& buckets);

// All that this rank alone has for an optimizer: of its state, and with stage 3 of the parameters.
std::vector<WatchedTensor> slices_of_rank(const ShardedOptimizer& optimizer);

// Copies of what this rank has of that state, and of what it keeps for another, by the same names.
std::vector<StatePiece> pieces_of_state(const torch::optim::Optimizer& optimizer,
                                        const std::vector<ShardedBucket>& buckets);

// Takes those of the tensors that are parameters in the buckets out, and gives copies of this rank's pieces of them,
// and of those that it keeps.
std::vector<StatePiece> take_pieces(io::NamedTensors& tensors, const std::vector<ShardedBucket>& buckets);

}  // namespace lockstep
