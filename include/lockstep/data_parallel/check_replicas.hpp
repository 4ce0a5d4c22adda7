// check_replicas: checks that the ranks still hold equal networks, to the bit.
//
//   lockstep::check_replicas(net, rank);       // net: a DataParallel, or a module
//   lockstep::check_replicas(net, adam, rank);  // and the optimizer's state
//
// Replicas come to differ if weights are loaded on one rank alone, if one rank makes or leaves out a step(), or if
// memory is broken. Training then goes on with averages of gradients that do not belong together.
#pragma once

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>
#include <lockstep/data_parallel/data_parallel.hpp>
#include <lockstep/ranks/rank.hpp>

namespace lockstep {

// Throws Error, on all ranks, if parameters or buffers differ between `rank`'s ranks; with an optimizer, also if its
// state does (momentum, Adam's averages). In a sharded net it is each rank's own slice: leave it out. The text
// names the ranks that differ from most others (all ranks if there is no majority), and the first parameter in which
// they differ. BatchNorm's running statistics count for a DataParallel whose last backward was by grains
// (BatchOptions::grain): these keep them equal. Otherwise they do not: each rank's follow its own samples until
// average_running_statistics(). Different kinds of CPU or GPU may round a step differently; then this throws although
// nothing is wrong. Between two synchronisations of a LocalSgd ranks differ by design. All ranks must call it, each
// from its own thread. Cost: two small allgathers, and one pass over the network at some gigabytes per second. An
// optimizer's state is copied first. On a GPU the host waits.
void check_replicas(const torch::nn::Module& module, Rank& rank);
void check_replicas(const torch::nn::Module& module, const torch::optim::Optimizer& optimizer, Rank& rank);
void check_replicas(const Replicas& net, Rank& rank);
void check_replicas(const Replicas& net, const torch::optim::Optimizer& optimizer, Rank& rank);

}  // namespace lockstep
