#include <torch/nn/functional/loss.h>
#include <lockstep/base/error.hpp>
#include <lockstep/models/gpt.hpp>
#include <lockstep/models/models.hpp>

#include "base/number_text.hpp"
#include "model_parts.hpp"

#include <charconv>
#include <iterator>
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

void check_that_gpt_alone_has(const ModelOptions& options) {
  const ModelOptions unchanged;
  const auto refuse = [&](bool given, const char* what) {
    if (given) throw Error(options.name + " has no " + what + "; gpt has");
  };
  refuse(options.layers != unchanged.layers, "number of `layers`");
  refuse(options.heads != unchanged.heads, "`heads`");
  refuse(options.embedding != unchanged.embedding, "`embedding`");
  refuse(options.context != unchanged.context, "`context`");
  refuse(options.residual_dropout != unchanged.residual_dropout, "`residual_dropout`");
}

}  // namespace

std::vector<std::string> model_names() {
  return {"lenet", "mlp", "alexnet", "resnet18", "gpt"};
}

bool learns_text(const ModelOptions& options) {
  return options.name == "gpt";
}

void check_model(const ModelOptions& options) {
  const auto refuse = [&](bool given, const char* what, const char* who) {
    if (given) throw Error(options.name + " has no " + what + "; " + who);
  };
  const bool image_size = options.image_size != 0, groups = options.groups != 1;
  if (options.name != "gpt") check_that_gpt_alone_has(options);
  const char* const who_drops = options.name == "gpt" ? "it has `residual_dropout`" : "alexnet has";
  if (options.name != "alexnet") refuse(options.dropout != ModelOptions().dropout, "dropout", who_drops);
  if (options.name == "lenet") {
    refuse(options.width != 1, "width", "mlp, alexnet and resnet18 have one");
    refuse(image_size, "image size", "alexnet and resnet18 have one");
    refuse(groups, "groups", "alexnet has");
  } else if (options.name == "mlp") {
    check_width("mlp", options.width);
    refuse(image_size, "image size", "alexnet and resnet18 have one");
    refuse(groups, "groups", "alexnet has");
  } else if (options.name == "alexnet") {
    check_options(alexnet_options(options, /*seed=*/0));
  } else if (options.name == "resnet18") {
    refuse(groups, "groups", "alexnet has");
    check_options(resnet18_options(options, /*seed=*/0));
  } else if (options.name == "gpt") {
    refuse(options.width != 1, "width", "its `embedding` says how wide it is");
    refuse(image_size, "image size", "alexnet and resnet18 have one");
    refuse(groups, "groups", "alexnet has");
    check_options(gpt_options(options, /*seed=*/0));
  } else {
    std::string known;
    for (const auto& name : model_names()) known += (known.empty() ? "" : ", ") + name;
    throw Error("the model is \"" + options.name + "\"; there are " + known, {.options = {"model"}});
  }
}

torch::nn::Sequential make_model(const ModelOptions& options, uint64_t seed) {
  check_model(options);
  // The pointer must be to the base class: a Sequential takes any other module for its only layer.
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
  std::string text = options.name;
  if (options.width != 1) {
    char width[32];  // the shortest text that is read back as this number
    text += ", width " + std::string(width, std::to_chars(width, std::end(width), options.width).ptr);
  }
  const std::string size = std::to_string(options.image_size);
  if (options.image_size != 0) text += ", images of " + size + " x " + size;
  if (options.groups != 1) text += ", " + std::to_string(options.groups) + " groups";
  if (options.dropout != ModelOptions().dropout) text += ", dropout " + number_text(options.dropout);
  const ModelOptions unchanged;
  const auto add = [&](int64_t value, int64_t otherwise, const char* what) {
    if (value != otherwise) text += ", " + std::to_string(value) + " " + what;
  };
  add(options.layers, unchanged.layers, "layers");
  add(options.heads, unchanged.heads, "heads");
  if (options.embedding != unchanged.embedding) text += ", embedding " + std::to_string(options.embedding);
  if (options.context != unchanged.context) text += ", context " + std::to_string(options.context);
  if (options.residual_dropout != unchanged.residual_dropout)
    text += ", residual dropout " + number_text(options.residual_dropout);
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
