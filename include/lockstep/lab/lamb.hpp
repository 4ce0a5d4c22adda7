// Lamb: layer-wise adaptive moments (You et al. 2020, "Large Batch Optimization for Deep Learning: Training BERT in 76
// minutes", arXiv:1904.00962, algorithm 2): AdamW in which each layer moves by a share of its own size.
//
//   lockstep::Lamb lamb(net->parameters(), lockstep::LambOptions(/*lr=*/2e-3).weight_decay(0.01));
//
// It is a torch::optim::Optimizer like LibTorch's, with parameter groups, torch::save and torch::load. A layer is one
// parameter tensor. Its norms need the whole layer: slices of a layer on a tensor axis (parallel_layers.hpp) would be
// scaled by the norms of the slices. Use it from one thread. It waits for no GPU.
#pragma once

#include <torch/optim/optimizer.h>
#include <lockstep/optim/layer_wise.hpp>

#include <tuple>
#include <vector>

namespace lockstep {

// Step t = 1, 2, … computes in each parameter group, for each parameter x with gradient g:
//   m = beta1 * m + (1 - beta1) * g           m^ = m / (1 - beta1^t)         m = v = 0 before the first step
//   v = beta2 * v + (1 - beta2) * g^2         v^ = v / (1 - beta2^t)
//   u = m^ / (sqrt(v^) + eps) + weight_decay * x
//   x = x - lr * |x| / |u| * u                the ratio is 1 if |x| or |u| is 0, as the authors' code has it
struct LambOptions : public torch::optim::OptimizerCloneableOptions<LambOptions>, public LayerWise {
  LambOptions(double lr = 1e-3) : lr_(lr) {}
  using betas_t = std::tuple<double, double>;
  TORCH_ARG(double, lr);
  TORCH_ARG(betas_t, betas) = std::make_tuple(0.9, 0.999);
  TORCH_ARG(double, eps) = 1e-6;
  TORCH_ARG(double, weight_decay) = 0;
  TORCH_ARG(bool, adapt) = true;  // false: the ratio is 1, as is usual for biases and BatchNorm's weights

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
  double get_lr() const override { return lr(); }
  void set_lr(double lr) override { this->lr(lr); }
  void set_weight_decay(double weight_decay) override { this->weight_decay(weight_decay); }
};

struct LambParamState : public torch::optim::OptimizerCloneableParamState<LambParamState> {
  TORCH_ARG(int64_t, step) = 0;          // t
  TORCH_ARG(torch::Tensor, exp_avg);     // m
  TORCH_ARG(torch::Tensor, exp_avg_sq);  // v

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
};

class Lamb : public torch::optim::Optimizer {
 public:
  // A group's own options hold as they are; the defaults are not merged into them. Throws Error for an option that is
  // negative or not a number, or a beta outside of [0, 1), in `defaults` or in a group's own.
  explicit Lamb(const std::vector<torch::optim::OptimizerParamGroup>& groups, const LambOptions& defaults = {});
  explicit Lamb(std::vector<torch::Tensor> parameters, const LambOptions& defaults = {});

  // A parameter without a gradient stays as it is. With a closure, step() returns its loss. Throws Error for a sparse
  // gradient.
  torch::Tensor step(LossClosure closure = nullptr) override;

  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;
};

}  // namespace lockstep
