#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>
#include <lockstep/base/error.hpp>
#include <lockstep/optim/lamb.hpp>
#include <lockstep/optim/lars.hpp>
#include <lockstep/optim/optimizers.hpp>

#include "base/number_text.hpp"

#include <algorithm>
#include <limits>
#include <utility>

namespace lockstep {
namespace {

bool has_momentum(const std::string& name) {
  return name == "sgd" || name == "lars";
}

}  // namespace

const std::vector<std::string>& optimizer_names() {
  static const std::vector<std::string> names = {"sgd", "adam", "adamw", "lars", "lamb"};
  return names;
}

void check_optimizer(const std::string& name, const OptimizerSettings& settings) {
  const auto& names = optimizer_names();
  if (std::find(names.begin(), names.end(), name) == names.end()) {
    throw Error("the optimizer is \"" + name + "\"; it must be sgd, adam, adamw, lars or lamb");
  }
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
  if (settings.momentum > 0 && !has_momentum(name)) {
    throw Error("--momentum goes with the optimizers sgd and lars; " + name +
                " averages gradients by rates of its own");
  }
  if (settings.nesterov && (name != "sgd" || settings.momentum == 0)) {
    throw Error("nesterov goes with sgd that has a momentum");
  }
}

std::unique_ptr<torch::optim::Optimizer> make_optimizer(const std::string& name, std::vector<torch::Tensor> parameters,
                                                        const OptimizerSettings& settings) {
  check_optimizer(name, settings);
  const auto [lr, momentum, nesterov, decay] = settings;
  if (name == "adam") {
    return std::make_unique<torch::optim::Adam>(std::move(parameters),
                                                torch::optim::AdamOptions(lr).weight_decay(decay));
  }
  if (name == "adamw") {
    return std::make_unique<torch::optim::AdamW>(std::move(parameters),
                                                 torch::optim::AdamWOptions(lr).weight_decay(decay));
  }
  if (name == "lars") {
    return std::make_unique<Lars>(std::move(parameters), LarsOptions(lr).momentum(momentum).weight_decay(decay));
  }
  if (name == "lamb") return std::make_unique<Lamb>(std::move(parameters), LambOptions(lr).weight_decay(decay));
  return std::make_unique<torch::optim::SGD>(
      std::move(parameters), torch::optim::SGDOptions(lr).momentum(momentum).nesterov(nesterov).weight_decay(decay));
}

void set_learning_rate(torch::optim::Optimizer& optimizer, double lr) {
  for (auto& group : optimizer.param_groups()) group.options().set_lr(lr);
}

bool needs_whole_layers(const std::string& name) {
  return name == "lars" || name == "lamb";
}

std::string to_string(const std::string& name, const OptimizerSettings& settings) {
  std::string text = name;
  if (settings.momentum > 0) text += ", momentum " + number_text(settings.momentum);
  if (settings.nesterov) text += " (Nesterov)";
  if (settings.weight_decay > 0) text += ", weight decay " + number_text(settings.weight_decay);
  return text;
}

}  // namespace lockstep
