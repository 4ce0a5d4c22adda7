#include "group_sizes.hpp"

#include <lockstep/base/error.hpp>

#include <numeric>
#include <string>

#include "base/classic.hpp"
#include "data/parts.hpp"
#include "ranks/gather.hpp"

namespace lockstep {
namespace {

std::vector<int64_t> ask_for_sizes(int64_t mine, Rank& rank) {
  const at::Tensor sizes = of_all_ranks(rank, {mine}).contiguous();
  return {sizes.const_data_ptr<int64_t>(), sizes.const_data_ptr<int64_t>() + sizes.numel()};
}

}  // namespace

std::vector<int64_t> equal_sizes(int64_t total, const Rank& rank) {
  std::vector<int64_t> sizes;
  for (int i = 0; i < rank.world_size(); ++i) sizes.push_back(part_of(total, i, rank.world_size()).size());
  return sizes;
}

std::vector<int64_t> sizes_in_group(const char* function, const at::Tensor& x, int64_t dim, Rank& rank, int64_t total) {
  const int64_t mine = x.size(dim);
  if (total == 0) return ask_for_sizes(mine, rank);
  std::vector<int64_t> sizes = equal_sizes(total, rank);
  if (sizes[rank.index()] == mine) return sizes;
  throw Error(std::string(function) + ": x is " + classic_text(x.sizes()) + ", but rank " +
              std::to_string(rank.index()) + " of " + std::to_string(rank.world_size()) + " has " +
              std::to_string(sizes[rank.index()]) + " of " + std::to_string(total) + " along dimension " +
              std::to_string(dim) + "; give each rank its part_of(total), or no total");
}

int64_t begin_of(const std::vector<int64_t>& sizes, int index) {
  return std::accumulate(sizes.begin(), sizes.begin() + index, int64_t{0});
}

}  // namespace lockstep
