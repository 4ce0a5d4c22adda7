// LayerWise: marks options of optimizers that look at whole layers, as Lars and Lamb, which scale by a layer's norm.
//
// Derive an optimizer's options from it, beside torch::optim::OptimizerOptions. Then an Optimizer refuses such an
// optimizer where ranks have slices of layers, since it would see the slices' norms. lockstep.hpp does not include it.
#pragma once

namespace lockstep {

class LayerWise {
 public:
  virtual ~LayerWise() = default;
  virtual void set_weight_decay(double weight_decay) = 0;  // for Optimizer::set_weight_decay
};

}  // namespace lockstep
