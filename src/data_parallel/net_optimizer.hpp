// NetOptimizer: an Optimizer whose steps the trainer takes apart. The trainer's Update has one.
//
// Use it from the rank's thread only.
#pragma once

#include <torch/optim/optimizer.h>
#include <lockstep/data_parallel/optimizer.hpp>

#include "replica_check.hpp"
#include "sharded_net.hpp"
#include "trained_net.hpp"

#include <memory>
#include <string>
#include <vector>

namespace lockstep {

class NetOptimizer : public Optimizer {
 public:
  // Errors name `owner`: what the user calls it. `grouping` is given the replica's module; empty: one group of all.
  NetOptimizer(std::shared_ptr<TrainedNet> net, const Make& make, const Grouping& grouping, const std::string& owner)
      : Optimizer(std::move(net), make, grouping, owner) {}

  using Optimizer::clip, Optimizer::compare_options, Optimizer::load_state, Optimizer::state, Optimizer::update,
      Optimizer::zero_grad;

  const std::shared_ptr<Replica>& replica() const { return net_->replica(); }
  torch::optim::Optimizer& inner() const { return *inner_; }  // steps the slices, if the net is sharded
  const std::shared_ptr<ShardedNet>& sharded() const { return sharded_; }

  // Gives the tensors that this rank alone has of a sharded net: its slices of the state, and with Sharded::parameters
  // also those of the parameters.
  std::vector<WatchedTensor> slices() const;
};

}  // namespace lockstep
