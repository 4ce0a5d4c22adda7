#include "trained_parameters.hpp"

#include <lockstep/base/error.hpp>

#include <unordered_set>

namespace lockstep {

NamedParameters parameters_of(const torch::nn::Module& module) {
  NamedParameters parameters;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const auto& item : module.named_parameters()) {
    if (seen.insert(item.value().unsafeGetTensorImpl()).second) parameters.emplace_back(item.key(), item.value());
  }
  return parameters;
}

TrainedParameters::TrainedParameters(const NamedParameters& parameters) {
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const auto& parameter : parameters) {
    if (!seen.insert(parameter.second.unsafeGetTensorImpl()).second) continue;
    (parameter.second.requires_grad() ? trained_ : frozen_).push_back(parameter);
  }
}

std::string TrainedParameters::unfrozen() const {
  for (const auto& [name, parameter] : frozen_) {
    if (parameter.requires_grad()) return name;
  }
  return {};
}

void TrainedParameters::check(const Rank& rank, const std::string& owner, const std::string& consequence) const {
  const std::string name = unfrozen();
  if (name.empty()) return;
  throw Error(rank.name() + ": " + owner + ": " + name + " needed no gradient when this " + owner +
              " was made, and needs one now, which " + consequence + ". Make the " + owner +
              " after requires_grad_(true), and then freeze what is trained later");
}

}  // namespace lockstep
