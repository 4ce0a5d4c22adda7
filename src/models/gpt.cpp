#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/gelu.h>
#include <c10/core/GradMode.h>
#include <lockstep/base/error.hpp>
#include <lockstep/models/gpt.hpp>
#include <lockstep/models/linear.hpp>

#include <cmath>
#include <string>

#include "base/classic.hpp"
#include "model_parts.hpp"

namespace lockstep {
namespace {

// Above these limits products of sizes would come near the largest integer, and parameters would fit no memory.
constexpr int64_t kMostLayers = 1024, kMostSize = int64_t{1} << 20;

torch::nn::LayerNorm norm_of(const GptOptions& options) {
  return torch::nn::LayerNorm(torch::nn::LayerNormOptions({options.embedding}));
}

// Draws N(0, 0.02^2) as GPT-2 does. Weights whose results go to the residual stream are smaller with more layers.
void draw_gpt_weights(torch::nn::Module& net, const GptOptions& options) {
  const torch::NoGradGuard no_grad;
  const at::Generator generator = at::detail::createCPUGenerator(options.seed);
  const double scale = 0.02, residual_scale = scale / std::sqrt(2.0 * static_cast<double>(options.layers));
  for (auto& item : net.named_parameters()) {
    const std::string& name = item.key();
    const bool is_residual = name.ends_with("projection.weight") || name.ends_with("down.weight");
    if (item.value().dim() > 1) item.value().normal_(0, is_residual ? residual_scale : scale, generator);
    if (name.ends_with("bias")) item.value().zero_();
  }
}

}  // namespace

void check_options(const GptOptions& options) {
  const auto check_size = [](const char* what, int64_t size, int64_t most) {
    check_at_least_one("gpt", what, size);
    if (size > most) {
      throw Error(std::string("gpt: ") + what + " is " + std::to_string(size) + "; it must be at most " +
                  std::to_string(most));
    }
  };
  check_size("the vocabulary", options.vocabulary, kMostSize);
  check_size("the number of layers", options.layers, kMostLayers);
  check_size("the number of heads", options.heads, kMostSize);
  check_size("the embedding", options.embedding, kMostSize);
  check_size("the context", options.context, kMostSize);
  if (options.embedding % options.heads != 0) {
    throw Error("gpt: " + std::to_string(options.heads) + " heads do not divide an embedding of " +
                std::to_string(options.embedding) + "; the embedding must be a multiple of the heads");
  }
  check_dropout("gpt", "the residual dropout", options.dropout);
}

void GptEmbeddingImpl::reset() {
  tokens = register_module("tokens", torch::nn::Embedding(options.vocabulary, options.embedding));
  positions = register_module("positions", torch::nn::Embedding(options.context, options.embedding));
  dropout = register_module("dropout", Dropout(options.dropout));
}

at::Tensor GptEmbeddingImpl::forward(const at::Tensor& x) {
  const bool is_whole = x.scalar_type() == at::kLong || x.scalar_type() == at::kInt;
  if (x.dim() != 2 || !is_whole || x.size(1) > options.context) {
    throw Error("gpt takes tokens [n, length] of int64, with a length of at most " + std::to_string(options.context) +
                ", its context; this is " + c10::toString(x.scalar_type()) + " " + classic_text(x.sizes()));
  }
  return dropout(tokens(x) + positions->weight.narrow(0, 0, x.size(1)));
}

void GptBlockImpl::reset() {
  const int64_t width = options.embedding;
  norm1 = register_module("norm1", norm_of(options));
  qkv = register_module("qkv", torch::nn::Linear(width, 3 * width));
  projection = register_module("projection", torch::nn::Linear(width, width));
  dropout1 = register_module("dropout1", Dropout(options.dropout));
  norm2 = register_module("norm2", norm_of(options));
  up = register_module("up", torch::nn::Linear(width, 4 * width));
  down = register_module("down", torch::nn::Linear(4 * width, width));
  dropout2 = register_module("dropout2", Dropout(options.dropout));
}

at::Tensor GptBlockImpl::forward(const at::Tensor& x) {
  const auto through = [](torch::nn::Linear& layer, const at::Tensor& z) {
    return fast_linear(z, layer->weight, layer->bias);
  };
  const at::Tensor heads = causal_attention(through(qkv, norm1(x)), options.heads);
  const at::Tensor y = x + dropout1(through(projection, heads));
  return y + dropout2(through(down, at::gelu(through(up, norm2(y)))));
}

at::Tensor token_cross_entropy(const at::Tensor& logits, const at::Tensor& targets) {
  return at::cross_entropy_loss(logits.flatten(0, 1), targets.flatten());
}

GptImpl::GptImpl(const GptOptions& options) {
  check_options(options);
  push_back("embedding", GptEmbedding(options));
  for (int64_t i = 1; i <= options.layers; ++i) push_back("block" + std::to_string(i), GptBlock(options));
  push_back("norm", norm_of(options));
  push_back("head", TiedLinear("embedding.tokens.weight"));
  tie_layers(*this);
  draw_gpt_weights(*this, options);
}

}  // namespace lockstep
