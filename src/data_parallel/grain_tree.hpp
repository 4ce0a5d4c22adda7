// The tree in which grains' gradients are added. It depends on the grains' numbers alone, so that the sum has the same
// bits however the grains lie on ranks. Pure functions.
//
// A block is a power of two of grains that begins at a multiple of itself. Two blocks side by side that make up a
// larger one are added, left plus right. What is left over at the end of the batch, blocks of falling size, is added
// from the right.
#pragma once

#include "data/parts.hpp"

#include <cstdint>
#include <vector>

#include "comm/tree_average.hpp"

namespace lockstep {

struct GrainBlock {
  int64_t begin = 0;
  int64_t size = 1;
  friend bool operator==(const GrainBlock&, const GrainBlock&) = default;
};

// Gives whether the two make up a block together.
bool are_halves(const GrainBlock& left, const GrainBlock& right);

// Gives the fewest blocks that make up a range of grains, ascending: one, or at most twice the logarithm of its length.
std::vector<GrainBlock> blocks_of(const Range& grains);

// Gives the additions, in their order, that leave the sum of all blocks of a batch in the first one. `blocks` are those
// of all runs of the batch, one after the other.
std::vector<comm::Addition> additions_of(const std::vector<GrainBlock>& blocks);

}  // namespace lockstep
