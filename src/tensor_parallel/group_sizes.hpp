// How much of a tensor's dimension each rank of a group holds.
#pragma once

#include <ATen/core/Tensor.h>
#include <lockstep/ranks/rank.hpp>

#include <cstdint>
#include <vector>

namespace lockstep {

// The sizes of all ranks' slices of `total`, as part_of cuts it.
std::vector<int64_t> equal_sizes(int64_t total, const Rank& rank);

// Every rank's x.size(dim), as part_of cuts `total`. If `total` is 0, the ranks ask each other. Throws Error, which
// names `function`, if x is not this rank's slice.
std::vector<int64_t> sizes_in_group(const char* function, const at::Tensor& x, int64_t dim, Rank& rank, int64_t total);

// The place where the slice of rank `index` begins.
int64_t begin_of(const std::vector<int64_t>& sizes, int index);

}  // namespace lockstep
