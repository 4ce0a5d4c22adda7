// Update: what a run's options make of the gradients of a step: the optimizer, with the learning rate of that moment.
//
// Plain SGD is FusedSgd, everything else a torch::optim::Optimizer. Used by one thread.
#pragma once

#include <torch/optim/optimizer.h>
#include <lockstep/learning_rate.hpp>
#include <lockstep/trainer.hpp>

#include "fused_sgd.hpp"

#include <memory>
#include <optional>
#include <vector>

namespace lockstep {

class Update {
 public:
  // `parameters` as FusedSgd has them.
  Update(const TrainOptions& options, const std::vector<at::Tensor>& parameters);

  // As FusedSgd::zero_grad.
  void zero_grad();

  // Takes the learning rate of the moment when `epochs_done` epochs are done, and returns it.
  double set_time(double epochs_done);

  void step();

  torch::optim::Optimizer* optimizer() { return optimizer_.get(); }  // null: plain SGD, which has no state

 private:
  const LearningRate rate_;
  FusedSgd sgd_;
  const std::unique_ptr<torch::optim::Optimizer> optimizer_;  // null for plain SGD
};

}  // namespace lockstep
