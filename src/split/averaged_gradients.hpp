// averaged_gradients_of: what a rank has of its replica's averaged gradients, wherever these lie.
#pragma once

#include <ATen/core/Tensor.h>
#include <lockstep/data_parallel/data_parallel.hpp>

#include <string>
#include <utility>
#include <vector>

namespace lockstep {

struct AveragedGradients {
  std::vector<std::pair<std::string, at::Tensor>> pieces = {};  // by the parameters' names
  bool in_slices = false;  // of a ShardedOptimizer, so that other ranks of the replica have other values
};

// Throws Error if a ShardedOptimizer has none.
AveragedGradients averaged_gradients_of(Replica& replica);

}  // namespace lockstep
