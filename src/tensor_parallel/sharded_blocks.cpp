#include "sharded_blocks.hpp"

#include <ATen/ops/gelu.h>
#include <lockstep/base/error.hpp>
#include <lockstep/models/linear.hpp>
#include <lockstep/ranks/functional.hpp>

#include "layer_slices.hpp"
#include "models/batch_norm_relu.hpp"

#include <memory>
#include <string>
#include <utility>

namespace lockstep {
namespace {

torch::nn::BatchNorm2d batch_norm(const torch::nn::AnyModule& norm) {
  auto module = std::dynamic_pointer_cast<torch::nn::BatchNorm2dImpl>(norm.ptr());
  if (module) return module;
  throw Error("a ResidualBlock whose BatchNorms are synchronised over ranks cannot be split by channels");
}

int64_t heads_of_rank(const GptOptions& options, const Rank& rank) {
  if (options.heads % rank.world_size() == 0) return options.heads / rank.world_size();
  throw Error(std::to_string(options.heads) + " heads do not divide over " + ranks_text(rank.world_size()) +
              ". These numbers of ranks would fit: " + divisors_of(options.heads));
}

std::optional<int64_t> tied_dimension(const std::optional<SlicedDimension>& how) {
  if (!how) return std::nullopt;
  if (how->blocks == 1 && how->dim < 2) return how->dim;
  throw Error("it is tied to a weight that is split in blocks, which a linear layer cannot follow");
}

}  // namespace

at::Tensor Activation::gathered(const at::Tensor& x, Rank& rank) const {
  if (!in_slices) return x;
  return gather_from_group(x, dim, rank, total > 0 ? total : x.size(dim) * rank.world_size());
}

GatheredImpl::GatheredImpl(torch::nn::AnyModule layer, const Activation& input, const Activation& output,
                           const Rank& rank)
    : layer_(std::move(layer)), input_(input), output_(output), rank_(rank) {
  const auto module = layer_.ptr();
  for (auto& item : module->named_parameters(/*recurse=*/false)) {
    register_parameter(item.key(), item.value(), item.value().requires_grad());
  }
  for (auto& item : module->named_buffers(/*recurse=*/false)) register_buffer(item.key(), item.value());
  for (auto& item : module->named_children()) register_module(item.key(), item.value());
  if (const auto* sliced = dynamic_cast<const Sliced*>(module.get())) dimensions_ = sliced->sliced_dimensions();
  train(module->is_training());
}

at::Tensor GatheredImpl::forward(const at::Tensor& x) {
  return output_.gathered(layer_.forward(input_.gathered(x, rank_)), rank_);
}

void GatheredImpl::train(bool on) {
  Module::train(on);
  layer_.ptr()->train(on);
}

ShardedResidualBlock::ShardedResidualBlock(const ResidualBlockImpl& whole, Rank& rank)
    : conv1_(register_module("conv1", OutputChannelParallelConv2d(whole.conv1, rank))),
      norm1_(register_module("norm1", ParallelBatchNorm2d(batch_norm(whole.norm1), rank))),
      conv2_(register_module("conv2", InputChannelParallelConv2d(whole.conv2, rank))),
      norm2_(register_module("norm2", whole_copy(batch_norm(whole.norm2), rank))),
      shortcut_(register_module("shortcut", whole_copy(whole.shortcut, rank))) {
  train(whole.is_training());
}

at::Tensor ShardedResidualBlock::forward(const at::Tensor& x) {
  const at::Tensor y = conv2_(batch_norm_relu(*norm1_, conv1_(x)));
  return batch_norm_relu(*norm2_, y, shortcut_->is_empty() ? x : shortcut_->forward(x));
}

ShardedGptEmbedding::ShardedGptEmbedding(const GptEmbeddingImpl& whole, Rank& rank)
    : tokens_(register_module("tokens", VocabularyParallelEmbedding(whole.tokens, rank))),
      positions_(register_module("positions", whole_copy(whole.positions, rank))),
      dropout_(register_module("dropout", whole_copy(whole.dropout, rank))) {
  train(whole.is_training());
}

at::Tensor ShardedGptEmbedding::forward(const at::Tensor& tokens) {
  return dropout_(tokens_(tokens) + positions_->weight.narrow(0, 0, tokens.size(1)));
}

ShardedGptBlock::ShardedGptBlock(const GptBlockImpl& whole, Rank& rank)
    : heads_(heads_of_rank(whole.options, rank)),
      norm1_(register_module("norm1", whole_copy(whole.norm1, rank))),
      norm2_(nullptr),
      qkv_(register_module("qkv", ColumnParallelLinear(whole.qkv, rank, /*blocks=*/3))),
      up_(nullptr),
      projection_(register_module("projection", RowParallelLinear(whole.projection, rank))),
      down_(nullptr),
      dropout1_(register_module("dropout1", whole_copy(whole.dropout1, rank))),
      dropout2_(nullptr) {
  norm2_ = register_module("norm2", whole_copy(whole.norm2, rank));
  up_ = register_module("up", ColumnParallelLinear(whole.up, rank));
  down_ = register_module("down", RowParallelLinear(whole.down, rank));
  dropout2_ = register_module("dropout2", whole_copy(whole.dropout2, rank));
  train(whole.is_training());
}

at::Tensor ShardedGptBlock::forward(const at::Tensor& x) {
  const at::Tensor y = x + dropout1_(projection_(causal_attention(qkv_(norm1_(x)), heads_)));
  return y + dropout2_(down_(at::gelu(up_(norm2_(y)))));
}

ShardedTiedLinear::ShardedTiedLinear(const TiedLinearImpl& whole, const Activation& input,
                                     const std::optional<SlicedDimension>& how, int64_t outputs, const Rank& rank)
    : Tied(whole.tied_to()), input_(input), dim_(tied_dimension(how)), outputs_(outputs), rank_(rank) {
  train(whole.is_training());
}

at::Tensor ShardedTiedLinear::forward(const at::Tensor& x) {
  const at::Tensor whole = input_.gathered(x, rank_);
  if (!dim_) return fast_linear(whole, tied_weight());
  if (*dim_ == 1) return reduce_from_group(fast_linear(scatter_to_group(whole, -1, rank_), tied_weight()), rank_);
  return gather_from_group(fast_linear(copy_to_group(whole, rank_), tied_weight()), -1, rank_, outputs_);
}

}  // namespace lockstep
