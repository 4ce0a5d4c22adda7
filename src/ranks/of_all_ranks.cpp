#include "of_all_ranks.hpp"

#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

namespace lockstep {

at::Tensor of_all_ranks(Rank& rank, const std::vector<int64_t>& numbers) {
  at::Tensor table = at::zeros({rank.world_size(), static_cast<int64_t>(numbers.size())}, at::kLong);
  table[rank.index()].copy_(at::tensor(numbers, at::kLong));
  table = table.to(rank.device());
  rank.allreduce(table);
  return table.cpu();
}

}  // namespace lockstep
