#include <lockstep/base/error.hpp>
#include <lockstep/lab/lamb.hpp>
#include <lockstep/lab/lars.hpp>
#include <lockstep/lab/optimizers.hpp>

#include "base/names.hpp"
#include "base/number_text.hpp"
#include "optim/fused_optimizers.hpp"

#include <array>
#include <limits>
#include <utility>

namespace lockstep {
namespace {

constexpr std::array optimizers{std::pair{OptimizerKind::sgd, "sgd"}, std::pair{OptimizerKind::adam, "adam"},
                                std::pair{OptimizerKind::adamw, "adamw"}, std::pair{OptimizerKind::lars, "lars"},
                                std::pair{OptimizerKind::lamb, "lamb"}};

double rate_of(OptimizerKind kind, const OptimizerSettings& settings) {
  return settings.lr.value_or(default_learning_rate(kind));
}

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

double default_learning_rate(OptimizerKind kind) {
  switch (kind) {
    case OptimizerKind::sgd:
      return 0.2;
    case OptimizerKind::adam:
    case OptimizerKind::adamw:
    case OptimizerKind::lamb:
      return 0.001;
    case OptimizerKind::lars:
      return 1;
  }
  throw Error("default_learning_rate: there is no such kind of optimizer");
}

void check_optimizer(OptimizerKind kind, const OptimizerSettings& settings) {
  const double largest = std::numeric_limits<float>::max();
  if (const double lr = rate_of(kind, settings); !(lr >= 0 && lr <= largest)) {
    throw Error("the learning rate is " + number_text(lr) + "; it must be a number from 0 to 3.4e38, the largest float",
                {.options = {"lr"}});
  }
  if (!(settings.momentum >= 0 && settings.momentum < 1)) {
    throw Error("the momentum is " + number_text(settings.momentum) + "; it must be at least 0 and below 1",
                {.options = {"momentum"}});
  }
  if (!(settings.weight_decay >= 0 && settings.weight_decay <= largest)) {
    throw Error("the weight decay is " + number_text(settings.weight_decay) + "; it must be at least 0",
                {.options = {"weight_decay"}});
  }
  if (settings.momentum > 0 && !has_momentum(kind)) {
    throw Error("`momentum` goes with the optimizers sgd and lars; " + std::string(to_string(kind)) +
                    " averages gradients by rates of its own",
                {.options = {"momentum", "optimizer"}});
  }
  if (settings.nesterov && (kind != OptimizerKind::sgd || settings.momentum == 0)) {
    throw Error("nesterov goes with sgd that has a momentum", {.options = {"nesterov"}});
  }
}

std::unique_ptr<torch::optim::Optimizer> make_optimizer(OptimizerKind kind,
                                                        const std::vector<torch::optim::OptimizerParamGroup>& groups,
                                                        const OptimizerSettings& settings) {
  check_optimizer(kind, settings);
  const auto& [given, momentum, nesterov, decay] = settings;
  const double lr = rate_of(kind, settings);
  switch (kind) {
    case OptimizerKind::sgd:
      return std::make_unique<FusedSgd>(
          groups, torch::optim::SGDOptions(lr).momentum(momentum).nesterov(nesterov).weight_decay(decay));
    case OptimizerKind::adam:
      return std::make_unique<FusedAdam>(groups, torch::optim::AdamOptions(lr).weight_decay(decay));
    case OptimizerKind::adamw:
      return std::make_unique<FusedAdamW>(groups, torch::optim::AdamWOptions(lr).weight_decay(decay));
    case OptimizerKind::lars:
      return std::make_unique<Lars>(groups, LarsOptions(lr).momentum(momentum).weight_decay(decay));
    case OptimizerKind::lamb:
      return std::make_unique<Lamb>(groups, LambOptions(lr).weight_decay(decay));
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
