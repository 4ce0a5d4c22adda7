#include <torch/nn/functional/loss.h>
#include <lockstep/base/error.hpp>
#include <lockstep/models/gpt.hpp>
#include <lockstep/models/models.hpp>

#include "base/number_text.hpp"
#include "model_parts.hpp"

#include <algorithm>
#include <string_view>
#include <type_traits>
#include <utility>

namespace lockstep {
namespace {

AlexNetOptions alexnet_options(const ModelOptions& options, uint64_t seed) {
  AlexNetOptions result{.width = options.width, .groups = options.groups, .dropout = options.dropout, .seed = seed};
  if (options.image_size != 0) result.image_size = options.image_size;
  return result;
}

ResNet18Options resnet18_options(const ModelOptions& options, uint64_t seed) {
  return {.width = options.width, .image_size = options.image_size, .seed = seed};
}

MlpOptions mlp_options(const ModelOptions& options, uint64_t seed) {
  MlpOptions result{.seed = seed};
  for (int64_t& units : result.hidden) units = scaled(units, options.width);
  return result;
}

GptOptions gpt_options(const ModelOptions& options, uint64_t seed) {
  return {.layers = options.layers,
          .heads = options.heads,
          .embedding = options.embedding,
          .context = options.context,
          .dropout = options.residual_dropout,
          .seed = seed};
}

// Checks the options that only some models have.
void check_owner(const ModelOptions& options) {
  struct Owned {
    const char* key;
    bool is_given;
    std::vector<std::string_view> owners;
  };
  const ModelOptions unchanged;
  for (const auto& [key, is_given, owners] :
       {Owned{"width", options.width != unchanged.width, {"mlp", "alexnet", "resnet18"}},
        Owned{"image_size", options.image_size != unchanged.image_size, {"alexnet", "resnet18"}},
        Owned{"groups", options.groups != unchanged.groups, {"alexnet"}},
        Owned{"dropout", options.dropout != unchanged.dropout, {"alexnet"}},
        Owned{"layers", options.layers != unchanged.layers, {"gpt"}},
        Owned{"heads", options.heads != unchanged.heads, {"gpt"}},
        Owned{"embedding", options.embedding != unchanged.embedding, {"gpt"}},
        Owned{"context", options.context != unchanged.context, {"gpt"}},
        Owned{"residual_dropout", options.residual_dropout != unchanged.residual_dropout, {"gpt"}}}) {
    if (!is_given || std::find(owners.begin(), owners.end(), options.name) != owners.end()) continue;
    std::string text = options.name + " has no `" + key + "`; it is of";
    for (const auto& owner : owners) text += std::string(owner == owners.front() ? " " : ", ") + std::string(owner);
    throw Error(text, {.options = {"model", key}});
  }
}

}  // namespace

std::vector<std::string> model_names() {
  return {"lenet", "mlp", "alexnet", "resnet18", "gpt"};
}

bool learns_text(const ModelOptions& options) {
  return options.name == "gpt";
}

void check_model(const ModelOptions& options) {
  const auto names = model_names();
  if (std::find(names.begin(), names.end(), options.name) == names.end()) {
    std::string known;
    for (const auto& name : names) known += (known.empty() ? "" : ", ") + name;
    throw Error("the model is \"" + options.name + "\"; there are " + known, {.options = {"model"}});
  }
  check_owner(options);
  if (options.name == "mlp") check_width("mlp", options.width);
  if (options.name == "alexnet") check_options(alexnet_options(options, /*seed=*/0));
  if (options.name == "resnet18") check_options(resnet18_options(options, /*seed=*/0));
  if (options.name == "gpt") check_options(gpt_options(options, /*seed=*/0));
}

torch::nn::Sequential make_model(const ModelOptions& options, uint64_t seed) {
  check_model(options);
  // The pointer is one to the base class, since a Sequential takes any other module for its only layer.
  std::shared_ptr<torch::nn::SequentialImpl> net;
  if (options.name == "lenet") net = std::make_shared<LeNetImpl>(seed);
  if (options.name == "mlp") net = std::make_shared<MlpImpl>(mlp_options(options, seed));
  if (options.name == "alexnet") net = std::make_shared<AlexNetImpl>(alexnet_options(options, seed));
  if (options.name == "resnet18") net = std::make_shared<ResNet18Impl>(resnet18_options(options, seed));
  if (options.name == "gpt") net = std::make_shared<GptImpl>(gpt_options(options, seed));
  return torch::nn::Sequential(std::move(net));
}

std::function<torch::Tensor(const torch::Tensor& y_hat, const torch::Tensor& y)> model_loss(
    const ModelOptions& options) {
  if (learns_text(options)) return token_cross_entropy;
  return [](const torch::Tensor& logits, const torch::Tensor& classes) {
    return torch::nn::functional::cross_entropy(logits, classes);
  };
}

at::MemoryFormat fast_memory_format(const ModelOptions& options, const c10::Device& device) {
  return options.name == "resnet18" && device.is_cpu() ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::Contiguous;
}

std::string to_string(const ModelOptions& options) {
  const ModelOptions unchanged;
  std::string text = options.name;
  const auto add = [&](auto ModelOptions::*option, const std::string& what, const std::string& unit = "") {
    const auto value = options.*option;
    if (value == unchanged.*option) return;
    if constexpr (std::is_floating_point_v<decltype(value)>) {
      text += ", " + what + number_text(value) + unit;
    } else {
      text += ", " + what + std::to_string(value) + unit;
    }
  };
  add(&ModelOptions::width, "width ");
  add(&ModelOptions::image_size, "images of ", " x " + std::to_string(options.image_size));
  add(&ModelOptions::groups, "", " groups");
  add(&ModelOptions::dropout, "dropout ");
  add(&ModelOptions::layers, "", " layers");
  add(&ModelOptions::heads, "", " heads");
  add(&ModelOptions::embedding, "embedding ");
  add(&ModelOptions::context, "context ");
  add(&ModelOptions::residual_dropout, "residual dropout ");
  return text;
}

std::shared_ptr<torch::nn::Module> NamedSequentialImpl::clone(const std::optional<torch::Device>& device) const {
  auto copy = std::make_shared<NamedSequentialImpl>();
  copy->train(is_training());
  auto layer = begin();
  for (const auto& name : named_children().keys()) copy->push_back(name, (layer++)->clone(device));
  tie_layers(*copy);
  return copy;
}

}  // namespace lockstep
