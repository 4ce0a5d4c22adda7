// Reductions over the ranks' values, added in the order of the ranks.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <string>
#include <vector>

namespace lockstep::comm {

// "sum", "avg", "product", "min", "max". Throws Error for c10d's other reductions, which are not offered here.
std::string name_of(const c10d::ReduceOp& op);

// The reduction of `values` on `device`, left in the memory of values[0] if `overwrite_first` and it lies there. Values
// on other devices are copied to it, on the current streams.
at::Tensor reduce_in_order(const std::vector<at::Tensor>& values, c10d::ReduceOp::RedOpType op,
                           const c10::Device& device, bool overwrite_first);

}  // namespace lockstep::comm
