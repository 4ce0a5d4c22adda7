#include "sharded_gpt.hpp"

#include <ATen/ops/gelu.h>
#include <lockstep/base/error.hpp>
#include <lockstep/models/linear.hpp>
#include <lockstep/ranks/functional.hpp>

#include <string>

#include "layer_slices.hpp"

namespace lockstep {
namespace {

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
