#include <torch/nn/modules/activation.h>
#include <lockstep/models/linear.hpp>
#include <lockstep/models/models.hpp>

#include "model_parts.hpp"

#include <string>

namespace lockstep {

MlpImpl::MlpImpl(const MlpOptions& options) {
  check_at_least_one("mlp", "inputs", options.inputs);
  check_at_least_one("mlp", "classes", options.classes);
  push_back("flatten", torch::nn::Flatten());
  int64_t in = options.inputs;
  for (size_t i = 0; i < options.hidden.size(); ++i) {
    const std::string number = std::to_string(i + 1);
    check_at_least_one("mlp", "hidden layer " + number, options.hidden[i]);
    push_back("fc" + number, FastLinear(in, options.hidden[i]));
    push_back("relu" + number, torch::nn::ReLU());
    in = options.hidden[i];
  }
  push_back("output", FastLinear(in, options.classes));
  draw_weights(*this, options.seed);
}

}  // namespace lockstep
