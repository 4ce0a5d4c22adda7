#include <torch/optim/serialize.h>
#include <torch/serialize/archive.h>
#include <lockstep/lab/lamb.hpp>

#include "optim/optimizer_parts.hpp"

#include <cmath>
#include <utility>

namespace lockstep {
namespace {

void check(const LambOptions& options) {
  check_not_negative("Lamb", "the learning rate", options.lr());
  check_not_negative("Lamb", "the weight decay", options.weight_decay());
  check_not_negative("Lamb", "eps", options.eps());
  for (const double beta : {std::get<0>(options.betas()), std::get<1>(options.betas())}) {
    if (!(beta >= 0 && beta < 1)) {
      throw Error("Lamb: a beta is " + number_text(beta) + "; it must be at least 0 and below 1");
    }
  }
}

LambParamState& state_of(std::unique_ptr<torch::optim::OptimizerParamState>& kept, const torch::Tensor& x) {
  if (!kept) {
    auto state = std::make_unique<LambParamState>();
    state->exp_avg(torch::zeros_like(x));
    state->exp_avg_sq(torch::zeros_like(x));
    kept = std::move(state);
  }
  return static_cast<LambParamState&>(*kept);
}

// Adam's step for the gradient `g`, with weight decay added; a new tensor.
torch::Tensor adam_step(const torch::Tensor& x, const torch::Tensor& g, LambParamState& state,
                        const LambOptions& options) {
  const auto [beta1, beta2] = options.betas();
  const auto t = static_cast<double>(++state.step());
  state.exp_avg().mul_(beta1).add_(g, 1 - beta1);
  state.exp_avg_sq().mul_(beta2).addcmul_(g, g, 1 - beta2);
  const torch::Tensor m = state.exp_avg() / (1 - std::pow(beta1, t));
  const torch::Tensor v = state.exp_avg_sq() / (1 - std::pow(beta2, t));
  return m.div_(v.sqrt().add_(options.eps())).add_(x, options.weight_decay());
}

}  // namespace

bool operator==(const LambOptions& a, const LambOptions& b) {
  return a.lr() == b.lr() && a.betas() == b.betas() && a.eps() == b.eps() && a.weight_decay() == b.weight_decay() &&
         a.adapt() == b.adapt();
}

void LambOptions::serialize(torch::serialize::OutputArchive& archive) const {
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(lr);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(betas);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(eps);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(weight_decay);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(adapt);
}

void LambOptions::serialize(torch::serialize::InputArchive& archive) {
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, lr);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(betas_t, betas);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, eps);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, weight_decay);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(bool, adapt);
}

void LambParamState::serialize(torch::serialize::OutputArchive& archive) const {
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(step);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(exp_avg);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(exp_avg_sq);
}

void LambParamState::serialize(torch::serialize::InputArchive& archive) {
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(int64_t, step);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(torch::Tensor, exp_avg);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(torch::Tensor, exp_avg_sq);
}

Lamb::Lamb(const std::vector<torch::optim::OptimizerParamGroup>& groups, const LambOptions& defaults)
    : Optimizer(groups, std::make_unique<LambOptions>(defaults)) {
  check(defaults);
  keep_own_options(groups, param_groups_);
  for (const auto& group : param_groups_) check(static_cast<const LambOptions&>(group.options()));
}

Lamb::Lamb(std::vector<torch::Tensor> parameters, const LambOptions& defaults)
    : Lamb({torch::optim::OptimizerParamGroup(std::move(parameters))}, defaults) {}

torch::Tensor Lamb::step(LossClosure closure) {
  const torch::Tensor loss = loss_of(closure);
  const torch::NoGradGuard no_grad;
  for (auto& group : param_groups_) {
    const auto& options = static_cast<const LambOptions&>(group.options());
    for (auto& x : group.params()) {
      if (!x.grad().defined()) continue;
      check_dense("Lamb", x.grad());
      torch::Tensor change = adam_step(x, x.grad(), state_of(state_[x.unsafeGetTensorImpl()], x), options);
      if (options.adapt()) {
        const torch::Tensor x_norm = x.norm(), change_norm = change.norm();
        change.mul_(ratio_or_1(x_norm, change_norm, (x_norm > 0).logical_and(change_norm > 0)));
      }
      x.sub_(change, options.lr());
    }
  }
  return loss;
}

void Lamb::save(torch::serialize::OutputArchive& archive) const {
  torch::optim::serialize<LambParamState, LambOptions>(archive, *this);
}

void Lamb::load(torch::serialize::InputArchive& archive) {
  torch::optim::serialize<LambParamState, LambOptions>(archive, *this);
}

}  // namespace lockstep
