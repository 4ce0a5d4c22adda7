#include <ATen/ops/embedding.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <lockstep/base/error.hpp>
#include <lockstep/models/linear.hpp>
#include <lockstep/tensor_parallel/parallel_transformer.hpp>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "data/parts.hpp"
#include "layer_slices.hpp"

namespace lockstep {
namespace {

using at::Tensor;

int64_t features_of(const torch::nn::LayerNorm& norm) {
  const auto& shape = norm->options.normalized_shape();
  if (shape.size() == 1) return shape[0];
  throw Error("ParallelLayerNorm: a normalisation over the last " + std::to_string(shape.size()) +
              " dimensions cannot be split by features" + kOrKeepWhole);
}

// Returns the options without the whole weights. A layer that was made of given weights has these in its options.
torch::nn::EmbeddingOptions settings_of(const torch::nn::Embedding& whole) {
  torch::nn::EmbeddingOptions options = whole->options;
  options._weight(Tensor());
  return options;
}

void check_embedding(const char* layer, const torch::nn::EmbeddingOptions& options) {
  if (!options.max_norm()) return;
  throw Error(std::string(layer) + ": an embedding with max_norm cannot be split" + kOrKeepWhole);
}

Tensor embedded(const Tensor& x, const Tensor& weight, const torch::nn::EmbeddingOptions& whole, int64_t padding) {
  return at::embedding(weight, x, padding, whole.scale_grad_by_freq(), whole.sparse());
}

void check_indices(const Tensor& x, int64_t count) {
  if (!x.is_cpu() || x.numel() == 0) return;
  const auto lowest = x.min().item<int64_t>(), highest = x.max().item<int64_t>();
  if (lowest >= 0 && highest < count) return;
  throw Error("VocabularyParallelEmbedding: x goes from " + std::to_string(lowest) + " to " + std::to_string(highest) +
              ", and the embeddings of all ranks from 0 to " + std::to_string(count - 1));
}

int64_t heads_of(const torch::nn::MultiheadAttentionOptions& options, const Rank& rank) {
  const int64_t heads = options.num_heads();
  if (options.add_bias_kv() || options.add_zero_attn()) {
    throw Error("ParallelMultiheadAttention: add_bias_kv and add_zero_attn cannot be split" + kOrKeepWhole);
  }
  if (heads % rank.world_size() == 0) return heads;
  throw Error("ParallelMultiheadAttention: " + std::to_string(heads) + " heads do not divide over " +
              ranks_text(rank.world_size()) + ". These numbers of ranks would fit: " + divisors_of(heads) +
              kOrKeepWhole);
}

}  // namespace

// ---- LayerNorm -----------------------------------------------------------------------------------------------------

ParallelLayerNormImpl::ParallelLayerNormImpl(const torch::nn::LayerNorm& whole, Rank& rank)
    : rank_(rank), features_(features_of(whole)), eps_(whole->options.eps()) {
  const auto sliced = [&](const char* name, const Tensor& tensor) {
    return register_parameter(name, tensor.defined() ? slice(name, tensor, 0, rank) : Tensor(), is_trained(tensor));
  };
  weight = sliced("weight", whole->weight);
  bias = sliced("bias", whole->bias);
  train(whole->is_training());
}

Tensor ParallelLayerNormImpl::forward(const Tensor& x) {
  const bool is_narrow = x.scalar_type() == at::kHalf || x.scalar_type() == at::kBFloat16;
  const Tensor wide = is_narrow ? x.to(at::kFloat) : x;
  const auto features = static_cast<double>(features_);
  const Tensor centred = wide - allreduce_with_gradient(wide.sum(-1, /*keepdim=*/true), rank_) / features;
  const Tensor variance = allreduce_with_gradient(centred.square().sum(-1, /*keepdim=*/true), rank_) / features;
  Tensor y = centred * (variance + eps_).rsqrt();
  if (weight.defined()) y = y * weight;
  if (bias.defined()) y = y + bias;
  return y.to(x.scalar_type());
}

// ---- Embedding -----------------------------------------------------------------------------------------------------

ParallelEmbeddingImpl::ParallelEmbeddingImpl(const torch::nn::Embedding& whole, Rank& rank)
    : rank_(rank), whole_(settings_of(whole)) {
  check_embedding("ParallelEmbedding", whole_);
  weight = register_parameter("weight", slice("weight", whole->weight, 1, rank), is_trained(whole->weight));
  train(whole->is_training());
}

Tensor ParallelEmbeddingImpl::forward(const Tensor& x) {
  compare_input(x, rank_);
  return embedded(x, weight, whole_, whole_.padding_idx().value_or(-1));
}

VocabularyParallelEmbeddingImpl::VocabularyParallelEmbeddingImpl(const torch::nn::Embedding& whole, Rank& rank)
    : rank_(rank), whole_(settings_of(whole)) {
  check_embedding("VocabularyParallelEmbedding", whole_);
  if (whole_.scale_grad_by_freq()) {
    throw Error(
        "VocabularyParallelEmbedding: an embedding with scale_grad_by_freq cannot be split by its vocabulary; "
        "split it by features" +
        kOrKeepWhole);
  }
  weight = register_parameter("weight", slice("weight", whole->weight, 0, rank), is_trained(whole->weight));
  train(whole->is_training());
}

Tensor VocabularyParallelEmbeddingImpl::forward(const Tensor& x) {
  check_indices(x, whole_.num_embeddings());
  compare_input(x, rank_);
  const Range own = part_of(whole_.num_embeddings(), rank_.index(), rank_.world_size());
  const Tensor is_foreign = (x < own.begin).logical_or(x >= own.end);
  const Tensor rows = at::where(is_foreign, at::zeros_like(x), x - own.begin);
  const int64_t padding = whole_.padding_idx().value_or(-1) - own.begin;
  const bool has_padding = whole_.padding_idx().has_value() && padding >= 0 && padding < own.size();
  const Tensor mine = embedded(rows, weight, whole_, has_padding ? padding : -1);
  return reduce_from_group(mine.masked_fill(is_foreign.unsqueeze(-1), 0), rank_);
}

// ---- MultiheadAttention --------------------------------------------------------------------------------------------

ParallelMultiheadAttentionImpl::ParallelMultiheadAttentionImpl(const torch::nn::MultiheadAttention& whole, Rank& rank)
    : rank_(rank), heads_(heads_of(whole->options, rank)), features_of_head_(whole->head_dim) {
  const auto sliced = [&](const char* name, const Tensor& tensor, int64_t blocks) {
    if (!tensor.defined()) return Tensor();
    return register_parameter(name, slice(name, tensor, {.dim = 0, .blocks = blocks}, rank), is_trained(tensor));
  };
  in_proj_weight = sliced("in_proj_weight", whole->in_proj_weight, 3);
  q_proj_weight = sliced("q_proj_weight", whole->q_proj_weight, 1);
  k_proj_weight = sliced("k_proj_weight", whole->k_proj_weight, 1);
  v_proj_weight = sliced("v_proj_weight", whole->v_proj_weight, 1);
  in_proj_bias = sliced("in_proj_bias", whole->in_proj_bias, 3);
  out_proj = register_module("out_proj", RowParallelLinear(whole->out_proj, rank));
  if (whole->options.dropout() > 0) {
    const DropoutImpl::Options::Slice mine{
        .dim = 1, .total = heads_, .index = rank.index(), .count = rank.world_size()};
    dropout_ = register_module("dropout", Dropout(DropoutImpl::Options{.p = whole->options.dropout(), .slice = mine}));
  }
  train(whole->is_training());
}

std::tuple<Tensor, Tensor, Tensor> ParallelMultiheadAttentionImpl::projected(const Tensor& query, const Tensor& key,
                                                                             const Tensor& value) {
  compare_input(query, rank_);
  const Tensor q = copy_to_group(query, rank_);
  const Tensor k = key.is_same(query) ? q : copy_to_group(key, rank_);
  const Tensor v = value.is_same(query) ? q : value.is_same(key) ? k : copy_to_group(value, rank_);
  if (in_proj_weight.defined() && k.is_same(q) && v.is_same(q)) {
    const auto all = fast_linear(q, in_proj_weight, in_proj_bias).chunk(3, /*dim=*/-1);
    return {all[0], all[1], all[2]};
  }
  const auto weights = in_proj_weight.defined() ? in_proj_weight.chunk(3)
                                                : std::vector<Tensor>{q_proj_weight, k_proj_weight, v_proj_weight};
  const auto biases = in_proj_bias.defined() ? in_proj_bias.chunk(3) : std::vector<Tensor>(3);
  return {fast_linear(q, weights[0], biases[0]), fast_linear(k, weights[1], biases[1]),
          fast_linear(v, weights[2], biases[2])};
}

Tensor ParallelMultiheadAttentionImpl::in_heads(const Tensor& projection) const {
  return projection.unflatten(-1, {-1, features_of_head_}).permute({1, 2, 0, 3});
}

std::tuple<Tensor, Tensor> ParallelMultiheadAttentionImpl::forward(const Tensor& query, const Tensor& key,
                                                                   const Tensor& value, const Tensor& key_padding_mask,
                                                                   bool need_weights, const Tensor& attn_mask,
                                                                   bool average_attn_weights) {
  const auto [queries, keys, values] = projected(query, key, value);
  const double scale = 1 / std::sqrt(static_cast<double>(features_of_head_));
  Tensor scores =
      at::matmul(in_heads(queries) * scale, in_heads(keys).transpose(-1, -2));  // [n, heads, length, source]
  if (attn_mask.defined()) scores = scores + attn_mask;
  if (key_padding_mask.defined()) {
    scores = scores.masked_fill(key_padding_mask.unsqueeze(1).unsqueeze(2), -std::numeric_limits<double>::infinity());
  }
  Tensor weights = at::softmax(scores, -1);
  if (dropout_) weights = dropout_(weights);
  const Tensor results = at::matmul(weights, in_heads(values)).permute({2, 0, 1, 3}).flatten(2);
  const Tensor y = out_proj(results);
  if (!need_weights) return {y, Tensor()};
  const Tensor of_heads = gather_from_group(weights, 1, rank_, heads_);
  return {y, average_attn_weights ? of_heads.sum(1) / static_cast<double>(heads_) : of_heads};
}

}  // namespace lockstep
