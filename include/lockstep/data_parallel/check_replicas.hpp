// check_replicas: whether the ranks still hold equal networks, as they should, to the bit.
//
//   lockstep::check_replicas(net, rank);  // net: a DataParallel, or a module
//
// Weights that were loaded on one rank alone, a step() that one rank made alone or left out, and broken memory make the
// replicas differ, and training goes on with averages of gradients that belong together no more.
#pragma once

#include <torch/nn/module.h>
#include <lockstep/data_parallel/data_parallel.hpp>
#include <lockstep/ranks/rank.hpp>

namespace lockstep {

// Throws Error, on all ranks, if parameters or buffers differ between `rank`'s ranks. It names the ranks that differ
// from most others (if there is no majority: all), and the first parameter in which they do. BatchNorm's running
// statistics do not count: they follow each rank's samples until average_running_statistics(). Different kinds of
// CPU or GPU may round a step differently: this then throws although nothing is wrong. Between two synchronisations of
// a LocalSgd ranks differ by design. All ranks must call it, each from its own thread. Cost: two small allreduces,
// and the network is read once, some gigabytes in a second; a GPU is waited for.
void check_replicas(const torch::nn::Module& module, Rank& rank);
template <class Module>
void check_replicas(const DataParallel<Module>& net, Rank& rank) {
  check_replicas(static_cast<const torch::nn::Module&>(*net), rank);
}

}  // namespace lockstep
