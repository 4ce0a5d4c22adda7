// Update: what a run's options make of the gradients of a step: the optimizer, with the learning rate of that moment.
//
// Plain SGD is FusedSgd, everything else a torch::optim::Optimizer; with zero_stage a ShardedOptimizer of it. Used by
// one thread.
#pragma once

#include <torch/optim/optimizer.h>
#include <lockstep/data_parallel/sharded_optimizer.hpp>
#include <lockstep/optim/learning_rate.hpp>
#include <lockstep/trainer/trainer.hpp>

#include "optim/fused_sgd.hpp"

#include <memory>
#include <optional>
#include <vector>

namespace lockstep {

class Update {
 public:
  // Of the parameters of `net`, as FusedSgd has them.
  Update(const TrainOptions& options, DataParallel<torch::nn::SequentialImpl>& net);

  // As FusedSgd::zero_grad.
  void zero_grad();

  // Takes the learning rate of the moment when `epochs_done` epochs are done, and returns it.
  double set_time(double epochs_done);

  void step();

  // What has a state: at most one of the two. Plain SGD has none.
  torch::optim::Optimizer* optimizer() { return optimizer_.get(); }
  ShardedOptimizer* sharded() { return sharded_.get(); }

 private:
  const LearningRate rate_;
  FusedSgd sgd_;
  const std::unique_ptr<torch::optim::Optimizer> optimizer_;  // null for plain SGD, and if it is sharded
  const std::unique_ptr<ShardedOptimizer> sharded_;           // null without zero_stage
};

}  // namespace lockstep
