#include "group_sizes.hpp"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <lockstep/base/error.hpp>
#include <lockstep/data/parts.hpp>

#include <numeric>
#include <string>

namespace lockstep {
namespace {

std::vector<int64_t> ask_for_sizes(int64_t mine, Rank& rank) {
  const auto options = at::TensorOptions(rank.device()).dtype(at::kLong);
  std::vector<at::Tensor> input{at::full({1}, mine, options)};
  std::vector<std::vector<at::Tensor>> outputs(1);
  for (int i = 0; i < rank.world_size(); ++i) outputs[0].push_back(at::empty({1}, options));
  rank.backend().allgather(outputs, input, c10d::AllgatherOptions{})->wait();
  std::vector<int64_t> sizes;
  for (const auto& output : outputs[0]) sizes.push_back(output.item<int64_t>());
  return sizes;
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
  throw Error(std::string(function) + ": x is " + c10::str(x.sizes()) + ", but rank " + std::to_string(rank.index()) +
              " of " + std::to_string(rank.world_size()) + " has " + std::to_string(sizes[rank.index()]) + " of " +
              std::to_string(total) + " along dimension " + std::to_string(dim) +
              "; give each rank its part_of(total), or no total");
}

int64_t begin_of(const std::vector<int64_t>& sizes, int index) {
  return std::accumulate(sizes.begin(), sizes.begin() + index, int64_t{0});
}

}  // namespace lockstep
