// Compares the ranks' replicas, and finds changes in memory that one rank alone has. check_replicas() and the trainer's
// ReplicaWatch use it.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>
#include <lockstep/base/error.hpp>
#include <lockstep/ranks/rank.hpp>

#include "io/safetensors.hpp"

#include <cstdint>
#include <functional>
#include <map>
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

// `noted` are this rank's hashes_of() the first of these tensors, taken after their last change; empty: not known. If
// there is no majority, a rank whose tensors have changed since is the one that differs. Call it on all ranks. Throws
// ReplicasDiffer, and Error where ranks have other numbers of tensors.
void compare_replicas(const io::NamedTensors& replica, Rank& rank, const std::vector<int64_t>& noted = {});

// Compares as check_replicas() says. Compares an optimizer's state too, unless the net is sharded.
void compare_replicas(TrainedNet& net, const torch::optim::Optimizer* optimizer);

// Calls compare(), in which each group of ranks with one part compares the part. If one group's throws ReplicasDiffer,
// this throws the same on all ranks of `world`. Call it on all ranks.
void compare_in_groups(const std::function<void()>& compare, Rank& world);

// Joins the names of the ranks with these numbers, as "rank 1 (cpu) and rank 3 (cpu)".
template <class Number>
std::string joined_names(const std::vector<Number>& ranks, const std::vector<std::string>& names) {
  std::string text;
  for (const Number rank : ranks) text += (text.empty() ? "" : " and ") + names[static_cast<size_t>(rank)];
  return text;
}

struct WatchedTensor {
  std::string name;
  at::Tensor values;
  // Each write, such as a forward's, changes the version. Then the bits tell nothing.
  int64_t version = 0;
};

// Makes a WatchedTensor with the version that LibTorch counts.
WatchedTensor watched(const std::string& name, const at::Tensor& tensor);

// Finds tensors whose bits change while nothing writes there. Use it for memory that a rank alone has, such as a
// pipeline's stage, from the rank's thread. Call note() after an update, and check() before the next one. Cost of each
// call: one pass over the tensors, see tensor_hash.hpp; of check() a small allgather too.
class MemoryWatch {
 public:
  void note(const std::vector<WatchedTensor>& tensors);
  void forget();
  bool has_notes() const { return has_notes_; }

  // Throws ReplicasDiffer on all ranks if one rank's tensors have changed since note(). The error names that rank; its
  // ranks() are empty if no rank's tensors are as noted. Call it on all ranks of the run, each with the tensors that
  // were noted there.
  void check(const std::vector<WatchedTensor>& tensors, Rank& rank) const;

 private:
  struct Note {
    int64_t hash, version;
  };
  std::string what_has_changed(const std::vector<WatchedTensor>& tensors) const;

  bool has_notes_ = false;  // true also after note() of no tensors
  std::map<std::string, Note> notes_;
};

}  // namespace lockstep
