// Says which of a sharded net's tensors are slices, and turns slices and whole tensors into each other.
#pragma once

#include <torch/nn/modules/container/sequential.h>
#include <lockstep/ranks/rank.hpp>
#include <lockstep/tensor_parallel/parallel_layers.hpp>

#include <cstdint>
#include <map>
#include <string>

namespace lockstep {

// How each split tensor is split, by its name in the net.
std::map<std::string, SlicedDimension> sliced_dimensions_of(const torch::nn::Sequential& sharded);

// Takes `size` values of each block along the dimension, from the block's `begin` on. It is a copy only if there are
// several blocks.
at::Tensor slice_of_whole(const at::Tensor& whole, const SlicedDimension& how, int64_t begin, int64_t size);

// Joins the ranks' slices of a tensor whose size along the dimension is `total`. Call it on all ranks. Throws Error
// for a slice of another size, as gather_from_group does.
at::Tensor joined_slices(const at::Tensor& slice, const SlicedDimension& how, Rank& rank, int64_t total);

}  // namespace lockstep
