// How much of a tensor's dimension each rank of a group holds.
#pragma once

#include <ATen/core/Tensor.h>
#include <lockstep/ranks/rank.hpp>

#include <cstdint>
#include <vector>

namespace lockstep {

// `total` over the ranks, as part_of splits it.
std::vector<int64_t> equal_sizes(int64_t total, const Rank& rank);

// Every rank's x.size(dim), as part_of splits `total`. If `total` is 0, it asks the ranks. Throws Error, which names
// `function`, if x is not this rank's part.
std::vector<int64_t> sizes_in_group(const char* function, const at::Tensor& x, int64_t dim, Rank& rank, int64_t total);

// Where rank `index` begins.
int64_t begin_of(const std::vector<int64_t>& sizes, int index);

}  // namespace lockstep
