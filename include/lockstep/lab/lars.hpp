// Lars: layer-wise adaptive rate scaling (You, Gitman & Ginsburg 2017, "Large Batch Training of Convolutional
// Networks", arXiv:1708.03888, algorithm 1): SGD with momentum in which each layer moves by a share of its own size.
//
//   lockstep::Lars lars(net->parameters(), lockstep::LarsOptions(/*lr=*/8).weight_decay(5e-4));
//
// It is a torch::optim::Optimizer like LibTorch's, with parameter groups, torch::save and torch::load. A layer is one
// parameter tensor. Its norms need the whole layer: slices of a layer on a tensor axis (parallel_layers.hpp) would be
// scaled by the norms of the slices. Use it from one thread. It waits for no GPU.
#pragma once

#include <torch/optim/optimizer.h>
#include <lockstep/optim/layer_wise.hpp>

#include <vector>

namespace lockstep {

// A step computes in each parameter group, for each parameter w with gradient g:
//   rate = trust * |w| / (|g| + weight_decay * |w| + eps)         1 if |w| or |g| is 0, as the authors' code has it
//   v    = momentum * v + lr * rate * (g + weight_decay * w)      v = 0 before the first step
//   w    = w - v
struct LarsOptions : public torch::optim::OptimizerCloneableOptions<LarsOptions>, public LayerWise {
  LarsOptions(double lr) : lr_(lr) {}
  TORCH_ARG(double, lr);  // mostly 1 to 30, since rate multiplies it by `trust`
  TORCH_ARG(double, momentum) = 0.9;
  TORCH_ARG(double, weight_decay) = 0;
  TORCH_ARG(double, trust) = 0.001;
  TORCH_ARG(double, eps) = 0;
  TORCH_ARG(bool, adapt) = true;  // false: rate is 1, as is usual for biases and BatchNorm's weights

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
  double get_lr() const override { return lr(); }
  void set_lr(double lr) override { this->lr(lr); }
  void set_weight_decay(double weight_decay) override { this->weight_decay(weight_decay); }
};

struct LarsParamState : public torch::optim::OptimizerCloneableParamState<LarsParamState> {
  TORCH_ARG(torch::Tensor, velocity);  // v

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
};

class Lars : public torch::optim::Optimizer {
 public:
  // A group's own options hold as they are; the defaults are not merged into them. Throws Error for an option that is
  // negative or not a number, in `defaults` or in a group's own.
  explicit Lars(const std::vector<torch::optim::OptimizerParamGroup>& groups, const LarsOptions& defaults);
  explicit Lars(std::vector<torch::Tensor> parameters, const LarsOptions& defaults);

  // A parameter without a gradient stays as it is. With a closure, step() returns its loss. Throws Error for a sparse
  // gradient.
  torch::Tensor step(LossClosure closure = nullptr) override;

  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;
};

}  // namespace lockstep
