#include "grain_tree.hpp"

#include <cstddef>

namespace lockstep {

bool are_halves(const GrainBlock& left, const GrainBlock& right) {
  return left.size == right.size && left.begin + left.size == right.begin && left.begin % (2 * left.size) == 0;
}

std::vector<GrainBlock> blocks_of(const Range& grains) {
  std::vector<GrainBlock> blocks;
  for (int64_t grain = grains.begin; grain < grains.end; ++grain) {
    GrainBlock block{.begin = grain, .size = 1};
    while (!blocks.empty() && are_halves(blocks.back(), block)) {
      block = {.begin = blocks.back().begin, .size = 2 * block.size};
      blocks.pop_back();
    }
    blocks.push_back(block);
  }
  return blocks;
}

std::vector<comm::Addition> additions_of(const std::vector<GrainBlock>& blocks) {
  std::vector<comm::Addition> additions;
  std::vector<size_t> open;  // blocks that are not yet added to another
  std::vector<GrainBlock> sums = blocks;
  for (size_t next = 0; next < blocks.size(); ++next) {
    open.push_back(next);
    while (open.size() > 1 && are_halves(sums[open[open.size() - 2]], sums[open.back()])) {
      additions.push_back({.into = open[open.size() - 2], .from = open.back()});
      open.pop_back();
      sums[open.back()].size *= 2;
    }
  }
  for (; open.size() > 1; open.pop_back()) additions.push_back({.into = open[open.size() - 2], .from = open.back()});
  return additions;
}

}  // namespace lockstep
