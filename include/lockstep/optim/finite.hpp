// has_finite_gradients: may a step be taken, or would NaN or infinity spoil the weights?
//
//   net.loss(batch, criterion).backward();
//   if (lockstep::has_finite_gradients(net->parameters())) sgd.step();
//
// After a DataParallel's backward() all ranks have the same averages: a value that is not finite on one rank is in
// everybody's. So all ranks get the same answer in the same step without asking each other. Do not use it with a
// ShardedOptimizer, or with `average = false`: there .grad holds no averages, and ranks could get different answers.
// Thread-safe for different tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace lockstep {

// Looks at each .grad that is defined. A sum beyond its type's range counts as infinite. Cost: one pass over the
// gradients; on a GPU it waits for them.
bool has_finite_gradients(const std::vector<at::Tensor>& parameters);

}  // namespace lockstep
