// Finds ranks that pass different tensors where all must pass the same, such as the samples of a layer that is split
// over a group.
#pragma once

#include <ATen/core/Tensor.h>
#include <lockstep/ranks/rank.hpp>

#include <cstdint>
#include <optional>

namespace lockstep {

// Gives the first rank whose x is not rank 0's, by size and by sums over some thousand values. The answer is the same
// on all ranks. Call it on all ranks, equally often. `inputs` counts the calls of one place, from 1. It compares in the
// calls 2, 4, 8, …, since nobody trains by one call, and on a GPU in the first three of these. Differences of the size
// of rounding do not count, nor do values that are not finite. While a CUDA graph records, nothing is compared. The
// host waits for the other ranks, and for a GPU. A comparison costs one small allgather, and about 0.1 ms.
std::optional<int> rank_with_another_input(const at::Tensor& x, Rank& rank, int64_t inputs);

}  // namespace lockstep
