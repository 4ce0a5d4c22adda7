// uses_in_graph finds the tensors that a loss leads to.
#pragma once

#include <ATen/core/Tensor.h>

#include <unordered_map>

namespace lockstep {

// Counts, for each leaf of the graph that begins at `root`, the operators that read it.
using GraphUses = std::unordered_map<const at::TensorImpl*, int>;
GraphUses uses_in_graph(const at::Tensor& root);

}  // namespace lockstep
