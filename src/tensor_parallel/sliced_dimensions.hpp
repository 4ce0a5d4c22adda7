// Which of a sharded net's tensors are slices.
#pragma once

#include <torch/nn/modules/container/sequential.h>

#include <cstdint>
#include <map>
#include <string>

namespace lockstep {

// The split dimension of every tensor that is split, by its name in the net.
std::map<std::string, int64_t> sliced_dimensions_of(const torch::nn::Sequential& sharded);

}  // namespace lockstep
