// TrainedParameters has the parameters of a network that need a gradient, by name, each once.
//
// Code that exchanges gradients or weights takes this list when it is made. A parameter that needs a gradient later is
// not on the list, and training would leave it out in silence: unfrozen() finds it, and check() refuses it. The class
// is a plain value.
#pragma once

#include <torch/nn/module.h>
#include <lockstep/ranks/rank.hpp>

#include <string>
#include <utility>
#include <vector>

namespace lockstep {

using NamedParameters = std::vector<std::pair<std::string, at::Tensor>>;

// Gives all of a module's parameters, in the order of registration. A parameter with several names comes once, under
// the first.
NamedParameters parameters_of(const torch::nn::Module& module);

class TrainedParameters {
 public:
  TrainedParameters() = default;
  explicit TrainedParameters(const torch::nn::Module& module) : TrainedParameters(parameters_of(module)) {}
  // A tensor that is there twice counts once.
  explicit TrainedParameters(const NamedParameters& parameters);

  const NamedParameters& all() const { return trained_; }

  // Gives the name of a parameter that needed no gradient when this was made, and needs one now; empty: there is none.
  std::string unfrozen() const;

  // Throws Error if there is an unfrozen() one. `owner` is what the user has to make anew, as in "DataParallel";
  // `consequence` says what would become of that gradient.
  void check(const Rank& rank, const std::string& owner, const std::string& consequence) const;

 private:
  NamedParameters trained_, frozen_;
};

}  // namespace lockstep
