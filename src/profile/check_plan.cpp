#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/upsampling.h>
#include <lockstep/base/error.hpp>
#include <lockstep/models/gpt.hpp>
#include <lockstep/plan/plan.hpp>

#include <algorithm>
#include <string>

#include "base/classic.hpp"
#include "plan/cost_model.hpp"

namespace lockstep {
namespace {

std::string quoted_or_none(const std::vector<std::string>& lines, size_t index) {
  return index < lines.size() ? "\"" + lines[index] + "\"" : "no such layer";
}

}  // namespace

std::vector<std::string> model_signature(const torch::nn::Sequential& net) {
  std::vector<std::string> lines;
  for (const auto& layer : net->named_children()) {
    std::string line = layer.key() + ":";
    std::string separator = " ";
    for (const auto& parameter : layer.value()->named_parameters()) {
      line += separator + parameter.key() + " " + classic_text(parameter.value().sizes());
      separator = ", ";
    }
    // A resizing layer has no parameters. But the times and memory of all layers behind it depend on the size.
    if (const auto* const resize = layer.value()->as<torch::nn::UpsampleImpl>(); resize && resize->options.size()) {
      line += " to " + classic_text(at::IntArrayRef(*resize->options.size()));
    }
    // Parameters do not show the heads either, and slices must take whole heads.
    if (const auto* const block = layer.value()->as<GptBlockImpl>()) {
      line += ", " + std::to_string(block->options.heads) + " heads";
    }
    lines.push_back(line);
  }
  return lines;
}

void check_plan(const Plan& plan, const torch::nn::Sequential& net, int devices) {
  const auto found = model_signature(net);
  for (size_t i = 0; i < std::max(plan.layers.size(), found.size()); ++i) {
    if (i < plan.layers.size() && i < found.size() && plan.layers[i] == found[i]) continue;
    throw Error("plan: it was made for another net than this one, for \"" + plan.model + "\"" +
                (plan.options.empty() ? "" : " (" + plan.options + ")") + ": layer " + std::to_string(i) + " was " +
                quoted_or_none(plan.layers, i) + ", here it is " + quoted_or_none(found, i) +
                ". Plan again for this net, or train that one");
  }
  check_plan_shape(plan, static_cast<int64_t>(found.size()));
  try {
    check_mesh(plan.split.mesh, devices);
  } catch (const Error& error) {
    throw Error(std::string("plan: ") + error.what() + ". Use the devices it was made for, or plan again",
                error.data());
  }
}

}  // namespace lockstep
