// NetOptimizer: an optimizer of LibTorch over the parameters of a net, whole or in slices. The public Optimizer is one,
// and the trainer's Update has one.
//
// Used by its rank's thread only.
#pragma once

#include <torch/optim/optimizer.h>
#include <lockstep/data_parallel/optimizer.hpp>

#include "replica_check.hpp"
#include "sharded_net.hpp"
#include "trained_net.hpp"

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

namespace lockstep {

// More than twelve functions: what an Optimizer does, for each way to lay out a net.
class NetOptimizer {
 public:
  // Errors name `owner`: what the user calls it. `grouping` is given the replica's module; empty: one group of all.
  NetOptimizer(std::shared_ptr<TrainedNet> net, const Optimizer::Make& make, const Optimizer::Grouping& grouping,
               const std::string& owner);
  ~NetOptimizer();
  NetOptimizer(const NetOptimizer&) = delete;
  NetOptimizer& operator=(const NetOptimizer&) = delete;

  // Makes gradients undefined; or with `in_place`, unless the net is sharded, sets them to zero where they are.
  void zero_grad(bool in_place = false);

  at::Tensor clip(double max_norm);  // gives the norm before; nothing waits for a GPU
  void update();                     // steps with the gradients as they are
  Step step(const StepOptions& options);

  // Throws Error if ranks have groups or steps with different options, on all ranks that see it. All ranks must call
  // it.
  void compare_options(const StepOptions& of_step = {}) const;

  void compare_replicas() const;  // see check_replicas()

  std::vector<at::Tensor> gradients() const;  // see Optimizer

  // state() gives the state of the whole network, by name, equal on all ranks; load_state() sets it. All ranks must
  // call these four.
  io::NamedTensors state();
  void load_state(const io::NamedTensors& state);
  void save(const std::filesystem::path& file);
  void load(const std::filesystem::path& file);

  const std::shared_ptr<Replica>& replica() const { return net_->replica(); }
  torch::optim::Optimizer& inner() const { return *inner_; }  // steps the slices, if the net is sharded
  const std::shared_ptr<ShardedNet>& sharded() const { return sharded_; }

  // Gives the tensors that this rank alone has of a sharded net: its slices of the state, and with Sharded::parameters
  // also those of the parameters.
  std::vector<WatchedTensor> slices() const;

 private:
  io::NamedTensors without_frozen(const io::NamedTensors& state) const;
  void tell_of_new_ones(const io::NamedTensors& state) const;

  const std::shared_ptr<TrainedNet> net_;
  const std::shared_ptr<ShardedNet> sharded_;  // null: every rank has whole parameters
  const std::string name_;
  const std::unique_ptr<torch::optim::Optimizer> inner_;
  uint64_t steps_ = 0;
};

}  // namespace lockstep
