#include <torch/nn/modules/container/sequential.h>
#include <lockstep/error.hpp>
#include <lockstep/plan.hpp>

#include <algorithm>
#include <string>

#include "plan_shape.hpp"

namespace lockstep {
namespace {

std::string quoted_or_none(const std::vector<std::string>& lines, size_t index) {
  return index < lines.size() ? "\"" + lines[index] + "\"" : "no such layer";
}

std::string kind_of(const Plan& plan) {
  return "\"" + plan.model + "\"" + (plan.options.empty() ? "" : " (" + plan.options + ")");
}

}  // namespace

std::vector<std::string> model_signature(const torch::nn::Sequential& net) {
  std::vector<std::string> lines;
  for (const auto& layer : net->named_children()) {
    std::string line = layer.key() + ":";
    std::string separator = " ";
    for (const auto& parameter : layer.value()->named_parameters()) {
      line += separator + parameter.key() + " " + c10::str(parameter.value().sizes());
      separator = ", ";
    }
    lines.push_back(line);
  }
  return lines;
}

void check_plan(const Plan& plan, const torch::nn::Sequential& net, int devices) {
  const auto found = model_signature(net);
  for (size_t i = 0; i < std::max(plan.layers.size(), found.size()); ++i) {
    if (i < plan.layers.size() && i < found.size() && plan.layers[i] == found[i]) continue;
    throw Error("plan: it was made for another net than this one, for " + kind_of(plan) + ": layer " +
                std::to_string(i) + " was " + quoted_or_none(plan.layers, i) + ", here it is " +
                quoted_or_none(found, i) + ". Plan again for this net, or train that one");
  }
  check_plan_shape(plan, static_cast<int64_t>(found.size()));
  const auto& mesh = plan.mesh;
  const int64_t ranks = int64_t{mesh.data} * mesh.pipeline * mesh.tensor;
  if (ranks == devices) return;
  throw Error("plan: its mesh, data " + std::to_string(mesh.data) + " x pipeline " + std::to_string(mesh.pipeline) +
              " x tensor " + std::to_string(mesh.tensor) + ", is for " + std::to_string(ranks) +
              " devices, and there are " + std::to_string(devices) + ". Give it " + std::to_string(ranks) +
              ", or plan again for " + std::to_string(devices));
}

}  // namespace lockstep
