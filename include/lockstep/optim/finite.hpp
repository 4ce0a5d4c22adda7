// has_finite_gradients: may a step be taken, or would NaN or infinity spoil the weights?
//
//   net.loss(batch, criterion).backward();
//   if (lockstep::has_finite_gradients(net->parameters())) sgd.step();
//
// After a DataParallel's backward() all ranks have the same averages, so all get the same answer in the same step and
// ask each other nothing: what is not finite on one rank is in everybody's average. Not with a ShardedOptimizer, nor
// with `average = false`: there .grad holds no averages, and ranks could answer differently. Thread-safe for different
// tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace lockstep {

// Of each .grad that is there. A sum beyond its type's range counts as infinite. Cost: one pass over the gradients; on
// a GPU it waits for them.
bool has_finite_gradients(const std::vector<at::Tensor>& parameters);

}  // namespace lockstep
