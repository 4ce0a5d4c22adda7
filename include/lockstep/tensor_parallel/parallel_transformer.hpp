// These are the layers of transformers in slices: LayerNorm, Embedding, MultiheadAttention. parallel_layers.hpp says
// what holds for all layers in slices.
//
// In a block of your own an attention in slices takes and gives whole activations, as Shoeybi et al. 2019
// ("Megatron-LM", section 3) split it. So do a ColumnParallelLinear and a RowParallelLinear after it. Norms are whole
// copies. A block makes two sums over the ranks in forward and two in backward.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/pimpl.h>
#include <lockstep/nn/dropout.hpp>
#include <lockstep/ranks/rank.hpp>
#include <lockstep/tensor_parallel/parallel_layers.hpp>

#include <cstdint>
#include <tuple>

namespace lockstep {

// Computes layer normalisation over features that are in slices: weight and bias [features / ranks]. It makes two small
// sums over the ranks in forward and two in backward, with a number for each row.
//   x        [..., features / ranks]; bfloat16 and float16 are computed in float32
//   returns  the same
// Throws Error for a layer that normalises over more than the last dimension.
class ParallelLayerNormImpl : public torch::nn::Module, public Sliced {
 public:
  ParallelLayerNormImpl(const torch::nn::LayerNorm& whole, Rank& rank);
  at::Tensor forward(const at::Tensor& x);

  at::Tensor weight, bias;  // undefined if the whole layer has none

 private:
  Rank rank_;
  const int64_t features_;  // the whole layer's features
  const double eps_;
};
TORCH_MODULE(ParallelLayerNorm);

// Computes a torch::nn::Embedding, split by the features of its vectors: weight [embeddings, features / ranks]. It
// sends nothing.
//   x        [...], int64
//   returns  [..., features / ranks]
// Throws Error for a layer with max_norm, which changes weights by the norm of whole vectors.
class ParallelEmbeddingImpl : public torch::nn::Module, public Sliced {
 public:
  ParallelEmbeddingImpl(const torch::nn::Embedding& whole, Rank& rank);
  at::Tensor forward(const at::Tensor& x);

  at::Tensor weight;

 private:
  Rank rank_;
  const torch::nn::EmbeddingOptions whole_;
};
TORCH_MODULE(ParallelEmbedding);

// Computes a torch::nn::Embedding, split by its vocabulary: weight [embeddings / ranks, features]. It makes one sum in
// forward.
//   x        [...], int64, from 0 to embeddings - 1, equal on all ranks. Another value is an Error on the CPU. On GPUs
//            it gives zeros, because a look at the values would stop the queue
//   returns  [..., features]
// Throws Error for a layer with max_norm or scale_grad_by_freq.
class VocabularyParallelEmbeddingImpl : public torch::nn::Module, public Sliced {
 public:
  VocabularyParallelEmbeddingImpl(const torch::nn::Embedding& whole, Rank& rank);
  at::Tensor forward(const at::Tensor& x);

  at::Tensor weight;

 private:
  Rank rank_;
  const torch::nn::EmbeddingOptions whole_;
};
TORCH_MODULE(VocabularyParallelEmbedding);

// Computes a torch::nn::MultiheadAttention, split by heads: each rank computes heads / ranks of them. It makes one sum
// over the ranks in forward and one in backward for each distinct input. The attention's weights take one more exchange
// if need_weights asks for them. Its dropout is lockstep's (dropout.hpp), which drops the same on any number of ranks.
//   query       [length, n, features], key and value [source length, n, …], all whole
//   attn_mask   [length, source length], added to the scores; key_padding_mask [n, source length], true: left out
//   returns     [length, n, features], whole, and the weights [n, length, source length], or of each head
//               [n, heads, length, source length], or nothing
// Throws Error for heads that do not divide by the number of ranks, and for add_bias_kv and add_zero_attn.
class ParallelMultiheadAttentionImpl : public torch::nn::Module, public Sliced {
 public:
  ParallelMultiheadAttentionImpl(const torch::nn::MultiheadAttention& whole, Rank& rank);
  std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                             const at::Tensor& key_padding_mask = {}, bool need_weights = true,
                                             const at::Tensor& attn_mask = {}, bool average_attn_weights = true);

  at::Tensor in_proj_weight, in_proj_bias;                 // three blocks: for queries, keys and values
  at::Tensor q_proj_weight, k_proj_weight, v_proj_weight;  // in place of in_proj_weight, if sizes differ
  RowParallelLinear out_proj{nullptr};

 protected:
  FORWARD_HAS_DEFAULT_ARGS({3, torch::nn::AnyValue(at::Tensor())}, {4, torch::nn::AnyValue(true)},
                           {5, torch::nn::AnyValue(at::Tensor())}, {6, torch::nn::AnyValue(true)})

 private:
  std::tuple<at::Tensor, at::Tensor, at::Tensor> projected(const at::Tensor& query, const at::Tensor& key,
                                                           const at::Tensor& value);
  at::Tensor in_heads(const at::Tensor& projection) const;  // gives [n, own heads, length, features of a head]

  Rank rank_;
  const int64_t heads_, features_of_head_;  // the whole layer's numbers
  Dropout dropout_{nullptr};                // the dropout of the weights; null: none
};
TORCH_MODULE(ParallelMultiheadAttention);

}  // namespace lockstep
