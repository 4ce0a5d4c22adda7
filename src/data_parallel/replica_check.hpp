// How ranks compare what each of them holds a replica of. check_replicas() is made of it, and the trainer's
// ReplicaWatch.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>
#include <lockstep/base/error.hpp>
#include <lockstep/ranks/rank.hpp>

#include "io/safetensors.hpp"

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace lockstep {

class TrainedNet;

// Is thrown on all ranks at once. ranks() gives the indices of those that differ from most others; none if it is not
// known whose replica is wrong.
class ReplicasDiffer : public Error {
 public:
  ReplicasDiffer(const std::string& text, std::vector<int> ranks)
      : Error(text, {Error::difference, std::move(ranks)}) {}
};

// Gives parameters and buffers, except running statistics, and with an optimizer its state. The tensors share the
// module's memory.
io::NamedTensors replica_of(const torch::nn::Module& module, const torch::optim::Optimizer* optimizer = nullptr);

// Gives the running statistics (running_statistics_names.hpp). With grains they are equal on all ranks, once a backward
// is done.
io::NamedTensors running_statistics_of(const torch::nn::Module& module);

std::vector<int64_t> hashes_of(const io::NamedTensors& tensors);

// `noted` are hashes_of() the first of these tensors, of this rank, at a time since which nothing was to change them;
// empty: not known. If there is no majority, a rank whose tensors have changed since is the one that differs. All ranks
// must call it. Throws ReplicasDiffer, and Error where ranks have other numbers of tensors.
void compare_replicas(const io::NamedTensors& replica, Rank& rank, const std::vector<int64_t>& noted = {});

// Does what check_replicas() promises. With an optimizer compares its state too, unless the net is sharded.
void compare_replicas(TrainedNet& net, const torch::optim::Optimizer* optimizer);

// Calls compare(), in which each group of ranks that hold one part compares that part. If it throws ReplicasDiffer in
// one group, this throws it on all ranks of `world`, which all must call it.
void compare_in_groups(const std::function<void()>& compare, Rank& world);

}  // namespace lockstep
