// tensor_parallel: layers split by channels.
//   parallel_dropout    dropout of slices
//   parallel_functions  the differentiable collectives
//   parallel_layers     layers of which each rank keeps a slice
//   tensor_parallel     shard(): splits a Sequential by channels
#pragma once

#include <lockstep/tensor_parallel/parallel_dropout.hpp>
#include <lockstep/tensor_parallel/parallel_functions.hpp>
#include <lockstep/tensor_parallel/parallel_layers.hpp>
#include <lockstep/tensor_parallel/tensor_parallel.hpp>
