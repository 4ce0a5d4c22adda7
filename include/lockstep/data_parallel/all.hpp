// data_parallel: one replica a rank, and how their gradients become one.
//   balance               parts of each batch in proportion to the devices' speeds
//   check_replicas        do the ranks still hold equal networks?
//   communication_hook    how one bucket of gradients is averaged
//   criterion             what makes an output and targets a loss
//   data_parallel         DataParallel: a replica on every rank, gradients averaged
//   half_precision_hook   gradients travel in bfloat16 or float16
//   local_sgd             several steps alone, then an average of the parameters (DiLoCo)
//   optimizer_checkpoint  an optimizer's state as a safetensors file
//   power_sgd             gradients travel as products of two thin matrices
//   running_statistics    one set of BatchNorm's running statistics for all ranks
//   sharded_optimizer     ZeRO: each rank keeps a slice of the optimizer's state, and of the gradients
//   sync_batch_norm       BatchNorm over the samples of all ranks
//
// How it works. DataParallel gives Loss, whose backward() is what averages. The Reducer (src/data_parallel/reducer.hpp)
// keeps gradients in buckets and posts each bucket's allreduce while backward computes. backward_report.hpp tells all
// ranks the sizes of the parts and which parameters were used (docs/decisions/0003, 0005).
// A communication hook replaces a bucket's allreduce, also by several rounds. Reducer::take_turns gives all rounds one
// order (0014). LocalSgd averages parameters every H steps instead.
// A ShardedOptimizer takes the place of averaging and update: sharded_reducer.hpp reduces buckets to slices (0016).
// SyncBatchNorm normalises over all ranks' samples (0010). Balance measures what each rank computes, and rebalance.hpp
// finds the shares by which batches are cut (0015).
#pragma once

#include <lockstep/data_parallel/balance.hpp>
#include <lockstep/data_parallel/check_replicas.hpp>
#include <lockstep/data_parallel/communication_hook.hpp>
#include <lockstep/data_parallel/criterion.hpp>
#include <lockstep/data_parallel/data_parallel.hpp>
#include <lockstep/data_parallel/half_precision_hook.hpp>
#include <lockstep/data_parallel/local_sgd.hpp>
#include <lockstep/data_parallel/optimizer_checkpoint.hpp>
#include <lockstep/data_parallel/power_sgd.hpp>
#include <lockstep/data_parallel/running_statistics.hpp>
#include <lockstep/data_parallel/sharded_optimizer.hpp>
#include <lockstep/data_parallel/sync_batch_norm.hpp>
