// data_parallel: one replica per rank, and how their gradients are averaged.
//   check_replicas          checks that the ranks still hold equal networks
//   communication_hook      how one bucket of gradients is averaged
//   convert_sync_batchnorm  BatchNorm over the samples of all ranks
//   criterion               Criterion: a loss, the mean over samples; MeanOver, over something else
//   data_parallel           DataParallel: a replica on every rank, gradients averaged
//   evaluate_criteria       evaluate: the mean of any criterion over a data set
//   loss                    Loss, whose backward() averages; the guards NoSync and Whole
//   optimizer               Optimizer: steps, clips, skips, saves and loads, wherever the parameters lie
//   options                 DataParallelOptions, Sharded
//   running_statistics      one set of BatchNorm's running statistics for all ranks
// These are not in lockstep.hpp:
//   sync_batch_norm         the layer SyncBatchNorm
//
// This is how it works. DataParallel gives a Loss, whose backward() averages. src/data_parallel/gradient_buckets.hpp
// notes which gradients are there, and has each bucket averaged while backward computes, in one order on all ranks
// (0005). backward_report.hpp tells all ranks the sizes of the parts and which parameters were used (0003). reducer.hpp
// averages a bucket by an allreduce, or by the rounds of a communication hook (0014). In a sharded net (ZeRO)
// sharded_reducer.hpp reduces buckets to slices (0016), and divided_parameters.hpp gathers parameters (0031).
// SyncBatchNorm normalises over all ranks' samples (0010).
//
// Grains begin in these files. src/data_parallel/loss_part.hpp cuts a part into its grains, and replica_grains.hpp
// checks the grains and computes stand-ins. grain_terms.hpp takes each grain's gradients and averages their sums, which
// grain_sums.hpp adds up in one order (0021). Files of this room that do not name grains need not know them.
#pragma once

#include <lockstep/data_parallel/check_replicas.hpp>
#include <lockstep/data_parallel/communication_hook.hpp>
#include <lockstep/data_parallel/convert_sync_batchnorm.hpp>
#include <lockstep/data_parallel/criterion.hpp>
#include <lockstep/data_parallel/data_parallel.hpp>
#include <lockstep/data_parallel/evaluate_criteria.hpp>
#include <lockstep/data_parallel/loss.hpp>
#include <lockstep/data_parallel/optimizer.hpp>
#include <lockstep/data_parallel/options.hpp>
#include <lockstep/data_parallel/running_statistics.hpp>
