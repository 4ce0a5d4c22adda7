// clip_grad_norm: scales gradients down so that their norm over all parameters is at most a limit, wherever these lie.
//
//   net.loss(batch, criterion).backward();
//   lockstep::clip_grad_norm(net, 1.0);  // net: a DataParallel or a SplitModel; or a ShardedOptimizer
//   optimizer.step();
//
// As torch::nn::utils::clip_grad_norm_ (Pascanu et al. 2013), with the norm of the whole network's averaged gradients,
// equal on all ranks. Equal gradients give a norm of the same bits, wherever they lie: whole, in a ShardedOptimizer's
// slices, over the stages of a pipeline. Under no_sync() alone, or with `average = false`, a DataParallel has no
// averages: there each rank clips by a norm of its own. torch's own function is right for a DataParallel, but it counts
// a parameter that has two names twice. With a ShardedOptimizer .grad has no averages, so step() throws Error after it.
// A SplitModel's rank has only some of the gradients. Used by its rank's thread only. Cost: three passes over what this
// rank has, and two exchanges of a few numbers where ranks have different parts.
#pragma once

#include <ATen/core/Tensor.h>
#include <lockstep/data_parallel/data_parallel.hpp>
#include <lockstep/data_parallel/sharded_optimizer.hpp>
#include <lockstep/split/split_model.hpp>

namespace lockstep {

// Returns the norm before, a float64 on the rank's device; nothing waits for a GPU. All ranks must call it, after
// backward() and before step(). Throws Error: a max_norm that is not above 0; a ShardedOptimizer without averaged
// gradients, as after backward() under no_sync() alone; and as Rank::allreduce does.
at::Tensor clip_grad_norm(Replica& replica, double max_norm);
at::Tensor clip_grad_norm(ShardedOptimizer& optimizer, double max_norm);
at::Tensor clip_grad_norm(SplitModel& net, double max_norm);

template <class Module>
at::Tensor clip_grad_norm(DataParallel<Module>& net, double max_norm) {
  return clip_grad_norm(*net.replica(), max_norm);
}

}  // namespace lockstep
