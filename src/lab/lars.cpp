#include <torch/optim/serialize.h>
#include <torch/serialize/archive.h>
#include <lockstep/lab/lars.hpp>

#include "optim/optimizer_parts.hpp"

#include <utility>

namespace lockstep {
namespace {

void check(const LarsOptions& options) {
  check_not_negative("Lars", "the learning rate", options.lr());
  check_not_negative("Lars", "the momentum", options.momentum());
  check_not_negative("Lars", "the weight decay", options.weight_decay());
  check_not_negative("Lars", "the trust coefficient", options.trust());
  check_not_negative("Lars", "eps", options.eps());
}

// Gives the layer's rate, a scalar on the parameter's device.
torch::Tensor layer_rate(const torch::Tensor& w, const torch::Tensor& g, const LarsOptions& options) {
  const torch::Tensor w_norm = w.norm(), g_norm = g.norm();
  return ratio_or_1(options.trust() * w_norm, g_norm + options.weight_decay() * w_norm + options.eps(),
                    (w_norm > 0).logical_and(g_norm > 0));
}

}  // namespace

bool operator==(const LarsOptions& a, const LarsOptions& b) {
  return a.lr() == b.lr() && a.momentum() == b.momentum() && a.weight_decay() == b.weight_decay() &&
         a.trust() == b.trust() && a.eps() == b.eps() && a.adapt() == b.adapt();
}

void LarsOptions::serialize(torch::serialize::OutputArchive& archive) const {
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(lr);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(momentum);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(weight_decay);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(trust);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(eps);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(adapt);
}

void LarsOptions::serialize(torch::serialize::InputArchive& archive) {
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, lr);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, momentum);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, weight_decay);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, trust);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, eps);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(bool, adapt);
}

void LarsParamState::serialize(torch::serialize::OutputArchive& archive) const {
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(velocity);
}

void LarsParamState::serialize(torch::serialize::InputArchive& archive) {
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(torch::Tensor, velocity);
}

Lars::Lars(const std::vector<torch::optim::OptimizerParamGroup>& groups, const LarsOptions& defaults)
    : Optimizer(groups, std::make_unique<LarsOptions>(defaults)) {
  check(defaults);
  keep_own_options(groups, param_groups_);
  for (const auto& group : param_groups_) check(static_cast<const LarsOptions&>(group.options()));
}

Lars::Lars(std::vector<torch::Tensor> parameters, const LarsOptions& defaults)
    : Lars({torch::optim::OptimizerParamGroup(std::move(parameters))}, defaults) {}

torch::Tensor Lars::step(LossClosure closure) {
  const torch::Tensor loss = loss_of(closure);
  const torch::NoGradGuard no_grad;
  for (auto& group : param_groups_) {
    const auto& options = static_cast<const LarsOptions&>(group.options());
    for (auto& w : group.params()) {
      if (!w.grad().defined()) continue;
      check_dense("Lars", w.grad());
      torch::Tensor change = w.grad().add(w, options.weight_decay());
      if (options.adapt()) change.mul_(layer_rate(w, w.grad(), options));
      change.mul_(options.lr());
      auto& kept = state_[w.unsafeGetTensorImpl()];
      if (!kept) {
        kept = std::make_unique<LarsParamState>();
        static_cast<LarsParamState&>(*kept).velocity(torch::zeros_like(w));
      }
      torch::Tensor& velocity = static_cast<LarsParamState&>(*kept).velocity();
      velocity.mul_(options.momentum()).add_(change);
      w.sub_(velocity);
    }
  }
  return loss;
}

void Lars::save(torch::serialize::OutputArchive& archive) const {
  torch::optim::serialize<LarsParamState, LarsOptions>(archive, *this);
}

void Lars::load(torch::serialize::InputArchive& archive) {
  torch::optim::serialize<LarsParamState, LarsOptions>(archive, *this);
}

}  // namespace lockstep
