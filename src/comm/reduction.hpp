// These reductions add the ranks' values in the order of the ranks or of a tree. They are no collectives: one caller
// does all of the work.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <string>

#include "data/parts.hpp"
#include "tree_average.hpp"

namespace lockstep::comm {

using TensorPointers = c10::ArrayRef<const at::Tensor*>;

// Gives "sum", "avg", "product", "min" or "max"; also names of c10d's reductions that are not offered here.
std::string name_of(c10d::ReduceOp::RedOpType op);
bool is_offered(c10d::ReduceOp::RedOpType op);

// Gives "float [2, 3]".
std::string describe(at::ScalarType type, at::IntArrayRef sizes);

// Gives the tensor itself, or a copy without a graph, that is contiguous and has the tensor's values in memory. With
// LibTorch's negative or conjugate bit set, a tensor's memory has other signs than the tensor.
at::Tensor in_a_row(const at::Tensor& tensor);

// Gives elements `part` of a contiguous tensor as a flat view.
at::Tensor slice(const at::Tensor& tensor, const Range& part);

// Reduces elements `part` of `values`, in their order, into the same elements of each of `targets`. All are contiguous
// tensors of one type and size. A target may be one of the values. On the CPU, sums and averages of float and double
// pass over memory once. Everything else, and GPUs on their current streams, go through LibTorch, and the sum is made
// where targets[home] lies.
void reduce(TensorPointers values, c10d::ReduceOp::RedOpType op, TensorPointers targets, const Range& part,
            size_t home = 0);

// Adds in the order of `average`, divides, and then adds +0, so that no result is -0. The result goes to the targets'
// elements from number `to` on. A target may be the first value. Through LibTorch the sums are made in the values'
// memory.
void average_in_tree(TensorPointers values, const TreeAverage& average, TensorPointers targets, const Range& part,
                     int64_t to, size_t home = 0);

// Adds `values` from the last to the first in one pass over memory, on the CPU. The sum goes to `target`, which may be
// the first value. Gives false and does nothing if the type is neither float nor double, or if the tensors' elements
// lie in different orders in memory.
bool add_from_the_last(TensorPointers values, const at::Tensor& target);

}  // namespace lockstep::comm
