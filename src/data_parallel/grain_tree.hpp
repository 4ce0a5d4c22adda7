// Makes the tree in which grains' gradients are added, from the grains' numbers alone. So the sum has the same bits
// however the grains lie on ranks. The functions are pure.
//
// A block is a power of two of grains that begins at a multiple of itself. Two blocks side by side that make up a
// larger one are added, left plus right. Blocks left over at the end of the batch, of falling size, are added from the
// right.
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

// Tells whether the two make up a block together.
bool are_halves(const GrainBlock& left, const GrainBlock& right);

// Gives the fewest blocks that make up a range of grains, ascending: one, or at most twice the logarithm of its length.
std::vector<GrainBlock> blocks_of(const Range& grains);

// Gives the additions, in their order, that leave the sum of all blocks of a batch in the first one. `blocks` are those
// of all runs of the batch, one after the other.
std::vector<comm::Addition> additions_of(const std::vector<GrainBlock>& blocks);

}  // namespace lockstep
