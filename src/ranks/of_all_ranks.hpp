// of_all_ranks: what every rank has to say, for checks that compare the ranks.
#pragma once

#include <ATen/core/Tensor.h>
#include <lockstep/ranks/rank.hpp>

#include <bit>
#include <cstdint>
#include <vector>

namespace lockstep {

// Row r of the result, int64 [ranks, numbers] on the CPU, is what rank r gave. All ranks must call it, with as many
// numbers. One allreduce.
at::Tensor of_all_ranks(Rank& rank, const std::vector<int64_t>& numbers);

// For of_all_ranks, which passes whole numbers on.
inline int64_t bits_of(double number) {
  return std::bit_cast<int64_t>(number);
}

}  // namespace lockstep
