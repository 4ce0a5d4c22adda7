// Reductions over the ranks' values, added in the order of the ranks. Not a collective: one caller does all of it.
#pragma once

#include <ATen/core/Tensor.h>
#include <lockstep/data/parts.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <string>

namespace lockstep::comm {

using TensorPointers = c10::ArrayRef<const at::Tensor*>;

// "sum", "avg", "product", "min", "max". Throws Error for c10d's other reductions, which are not offered here.
std::string name_of(c10d::ReduceOp::RedOpType op);

// "float [2, 3]".
std::string describe(at::ScalarType type, at::IntArrayRef sizes);

// Elements `part` of a contiguous tensor, as a flat view.
at::Tensor slice(const at::Tensor& tensor, const Range& part);

// Elements `part` of `values`, contiguous tensors of one type and size, reduced in their order into the same elements
// of every one of `targets`. A target may be one of the values. On the CPU, sums and averages of float and double pass
// over memory once; everything else, and GPUs on their current streams, go through LibTorch. Then the sum is made where
// targets[home] lies.
void reduce(TensorPointers values, c10d::ReduceOp::RedOpType op, TensorPointers targets, const Range& part,
            size_t home = 0);

}  // namespace lockstep::comm
