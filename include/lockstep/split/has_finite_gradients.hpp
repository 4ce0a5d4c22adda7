// has_finite_gradients: may a step be taken, or would NaN or infinity spoil the weights?
//
//   net.loss(batch, criterion).backward();
//   if (lockstep::has_finite_gradients(net)) sgd.step();  // net: a DataParallel or a SplitModel; or a ShardedOptimizer
//
// All ranks get the same answer in the same step, wherever the gradients lie: whole, in a ShardedOptimizer's slices,
// over the stages of a pipeline. Used by its rank's thread only. Cost: one pass over what this rank has, and an
// allreduce of one number over each axis. On a GPU it waits for the gradients.
#pragma once

#include <lockstep/data_parallel/data_parallel.hpp>
#include <lockstep/data_parallel/sharded_optimizer.hpp>
#include <lockstep/split/split_model.hpp>

namespace lockstep {

// False if some rank has a number that is not finite in its averaged gradients, or in a .grad that was not averaged. A
// sum beyond its type's range counts as infinite. All ranks must call it, after backward() and before step(). Throws
// Error: a ShardedOptimizer without averaged gradients, as after backward() under no_sync() alone; and as
// Rank::allreduce does.
bool has_finite_gradients(Replica& replica);
bool has_finite_gradients(ShardedOptimizer& optimizer);
bool has_finite_gradients(SplitModel& net);

template <class Module>
bool has_finite_gradients(DataParallel<Module>& net) {
  return has_finite_gradients(*net.replica());
}

}  // namespace lockstep
