#include <lockstep/base/error.hpp>
#include <lockstep/optim/lamb.hpp>
#include <lockstep/optim/lars.hpp>
#include <lockstep/optim/optimizers.hpp>

#include "base/names.hpp"
#include "base/number_text.hpp"
#include "fused_optimizers.hpp"

#include <array>
#include <limits>
#include <utility>

namespace lockstep {
namespace {

constexpr std::array optimizers{std::pair{OptimizerKind::sgd, "sgd"}, std::pair{OptimizerKind::adam, "adam"},
                                std::pair{OptimizerKind::adamw, "adamw"}, std::pair{OptimizerKind::lars, "lars"},
                                std::pair{OptimizerKind::lamb, "lamb"}};

bool has_momentum(OptimizerKind kind) {
  return kind == OptimizerKind::sgd || kind == OptimizerKind::lars;
}

}  // namespace

std::string_view to_string(OptimizerKind kind) {
  return name_in(optimizers, kind);
}

OptimizerKind optimizer_from(std::string_view name) {
  return value_in(optimizers, name, "the optimizer");
}

void check_optimizer(OptimizerKind kind, const OptimizerSettings& settings) {
  const double largest = std::numeric_limits<float>::max();
  if (!(settings.lr >= 0 && settings.lr <= largest)) {
    throw Error("the learning rate is " + number_text(settings.lr) +
                "; it must be a number from 0 to 3.4e38, the largest float");
  }
  if (!(settings.momentum >= 0 && settings.momentum < 1)) {
    throw Error("the momentum is " + number_text(settings.momentum) + "; it must be at least 0 and below 1");
  }
  if (!(settings.weight_decay >= 0 && settings.weight_decay <= largest)) {
    throw Error("the weight decay is " + number_text(settings.weight_decay) + "; it must be at least 0");
  }
  if (settings.momentum > 0 && !has_momentum(kind)) {
    throw Error("`momentum` goes with the optimizers sgd and lars; " + std::string(to_string(kind)) +
                " averages gradients by rates of its own");
  }
  if (settings.nesterov && (kind != OptimizerKind::sgd || settings.momentum == 0)) {
    throw Error("nesterov goes with sgd that has a momentum");
  }
}

std::unique_ptr<torch::optim::Optimizer> make_optimizer(OptimizerKind kind, std::vector<torch::Tensor> parameters,
                                                        const OptimizerSettings& settings) {
  check_optimizer(kind, settings);
  const auto [lr, momentum, nesterov, decay] = settings;
  switch (kind) {
    case OptimizerKind::sgd:
      return std::make_unique<FusedSgd>(
          std::move(parameters),
          torch::optim::SGDOptions(lr).momentum(momentum).nesterov(nesterov).weight_decay(decay));
    case OptimizerKind::adam:
      return std::make_unique<FusedAdam>(std::move(parameters), torch::optim::AdamOptions(lr).weight_decay(decay));
    case OptimizerKind::adamw:
      return std::make_unique<FusedAdamW>(std::move(parameters), torch::optim::AdamWOptions(lr).weight_decay(decay));
    case OptimizerKind::lars:
      return std::make_unique<Lars>(std::move(parameters), LarsOptions(lr).momentum(momentum).weight_decay(decay));
    case OptimizerKind::lamb:
      return std::make_unique<Lamb>(std::move(parameters), LambOptions(lr).weight_decay(decay));
  }
  throw Error("make_optimizer: there is no such kind of optimizer");
}

void set_learning_rate(torch::optim::Optimizer& optimizer, double lr) {
  for (auto& group : optimizer.param_groups()) group.options().set_lr(lr);
}

bool needs_whole_layers(OptimizerKind kind) {
  return kind == OptimizerKind::lars || kind == OptimizerKind::lamb;
}

std::string to_string(OptimizerKind kind, const OptimizerSettings& settings) {
  std::string text(to_string(kind));
  if (settings.momentum > 0) text += ", momentum " + number_text(settings.momentum);
  if (settings.nesterov) text += " (Nesterov)";
  if (settings.weight_decay > 0) text += ", weight decay " + number_text(settings.weight_decay);
  return text;
}

}  // namespace lockstep
