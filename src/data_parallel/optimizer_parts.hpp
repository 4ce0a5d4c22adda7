// Optimizer::Parts takes the steps of a user's Optimizer apart, so that a CUDA graph can hold the update and the host
// does the rest. Recorded has one.
//
// Use it from the rank's thread only, and not longer than the Optimizer.
#pragma once

#include <lockstep/data_parallel/optimizer.hpp>

#include "optim/fused_optimizers.hpp"
#include "trained_net.hpp"

#include <memory>

namespace lockstep {

class Optimizer::Parts {
 public:
  explicit Parts(Optimizer& optimizer) : optimizer_(optimizer) {}

  const std::shared_ptr<Replica>& replica() const { return optimizer_.net_->replica(); }
  Fused* fused() const { return dynamic_cast<Fused*>(optimizer_.inner_.get()); }  // gives null for another optimizer

  void zero_grad(bool in_place) { optimizer_.zero_grad(in_place); }
  void begin_step(const StepOptions& options) { optimizer_.begin_step(options); }
  void update(const StepOptions& options) {
    if (options.clip > 0) optimizer_.clip(options.clip);
    optimizer_.update();
  }

 private:
  Optimizer& optimizer_;
};

}  // namespace lockstep
