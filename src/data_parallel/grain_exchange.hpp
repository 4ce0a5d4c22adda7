// Adds up all ranks' sums over their grains, so that each rank gets one slice of the result. It goes through the
// backend's alltoall, which all backends have, and in which nothing is added: the order of additions is the tree's
// alone.
#pragma once

#include <ATen/core/Tensor.h>
#include <lockstep/ranks/rank.hpp>

#include <cstdint>
#include <functional>
#include <vector>

namespace lockstep {

struct GrainRound {
  c10::intrusive_ptr<c10d::Work> work = {};  // the exchange to wait for; null: none
  std::function<at::Tensor()> sum = {};      // afterwards: the rank's slice of the sum, one dimension
};

// `blocks` are what GrainSums::finish() gave, and change in sum(); the columns are cut into as many equal slices as
// there are ranks. runs[r] up to runs[r + 1] are rank r's grains. All ranks must call it.
GrainRound post_grain_sums(Rank& rank, const at::Tensor& blocks, const std::vector<int64_t>& runs);

}  // namespace lockstep
