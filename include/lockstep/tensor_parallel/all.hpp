// tensor_parallel: layers split by channels.
//   parallel_functions    the differentiable collectives
//   parallel_layers       layers of which each rank keeps a slice
//   parallel_transformer  the same of LayerNorm, Embedding and MultiheadAttention
//   tensor_parallel       shard(): splits a Sequential by channels
//
// How it works. parallel_functions.hpp has six exchanges, each the gradient of another. All communication of tensor
// parallelism is in them, in forward and in backward. parallel_layers.hpp has layers that hold a slice of their
// weights. src/tensor_parallel/shard.cpp goes once through a network, knows whether each layer is given whole tensors
// or slices, and replaces the layer by this rank's slice of it (docs/decisions/0009).
#pragma once

#include <lockstep/tensor_parallel/parallel_functions.hpp>
#include <lockstep/tensor_parallel/parallel_layers.hpp>
#include <lockstep/tensor_parallel/parallel_transformer.hpp>
#include <lockstep/tensor_parallel/tensor_parallel.hpp>
