// check_replicas: checks that the ranks still hold equal networks, to the bit.
//
//   lockstep::check_replicas(adam);  // an Optimizer: its net and state
//   lockstep::check_replicas(net);   // a DataParallel or a SplitModel
//
// Replicas come to differ if weights are loaded on one rank alone, if one rank makes or leaves out a step(), or if
// memory is broken. Training then goes on with averages of gradients that do not belong together.
#pragma once

#include <torch/nn/module.h>
#include <lockstep/data_parallel/optimizer.hpp>
#include <lockstep/ranks/rank.hpp>

namespace lockstep {

// Throws Error, on all ranks, if parameters or buffers differ between ranks that hold the same part of the network. An
// Optimizer's state (momentum, Adam's averages) counts too, unless each rank has a slice of it. The text names the
// ranks that differ from most others (all ranks if there is no majority), and the first parameter in which they differ.
// BatchNorm's running statistics count if the net's last backward was by grains (BatchOptions::grain): grains keep them
// equal. Otherwise they follow each rank's own samples until average_running_statistics(), and do not count. Different
// kinds of CPU or GPU may round a step differently; then this throws although nothing is wrong. Between two
// synchronisations of a LocalSgd ranks differ by design. Call check_replicas on all ranks, each from its own thread.
// Cost: two small allgathers, and one pass over the network at some gigabytes per second, with Sharded::parameters also
// an allgather of these. An optimizer's state is copied first. On a GPU the host waits.
void check_replicas(const Optimizer& optimizer);
void check_replicas(TrainedNet& net);
template <class Net>
requires requires(const Net& net) {
  net.trained();
}
void check_replicas(const Net& net) {
  check_replicas(*net.trained());
}
void check_replicas(const torch::nn::Module& module, Rank& rank);  // compares `rank`'s ranks

}  // namespace lockstep
