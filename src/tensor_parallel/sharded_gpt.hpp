// These are one rank's slices of the layers of a Gpt, and of any layer that is tied to another layer's weight.
//
// Each takes whole activations and gives whole ones, so a block makes two sums over the ranks in forward and two in
// backward (Shoeybi et al. 2019, "Megatron-LM", section 3).
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/normalization.h>
#include <lockstep/models/gpt.hpp>
#include <lockstep/models/tied_linear.hpp>
#include <lockstep/ranks/rank.hpp>
#include <lockstep/tensor_parallel/parallel_layers.hpp>
#include <lockstep/tensor_parallel/parallel_transformer.hpp>

#include <cstdint>
#include <optional>

#include "gathered.hpp"

namespace lockstep {

// The vocabulary is split; the positions are whole.
class ShardedGptEmbedding : public torch::nn::Module {
 public:
  ShardedGptEmbedding(const GptEmbeddingImpl& whole, Rank& rank);
  at::Tensor forward(const at::Tensor& tokens);

 private:
  VocabularyParallelEmbedding tokens_;
  torch::nn::Embedding positions_;
  Dropout dropout_;
};

// Each rank computes some of the heads, and some of the MLP's units; the norms are whole.
class ShardedGptBlock : public torch::nn::Module {
 public:
  // Throws Error for heads that do not divide by the number of ranks.
  ShardedGptBlock(const GptBlockImpl& whole, Rank& rank);
  at::Tensor forward(const at::Tensor& x);

 private:
  const int64_t heads_;  // this rank's number of heads
  torch::nn::LayerNorm norm1_, norm2_;
  ColumnParallelLinear qkv_, up_;
  RowParallelLinear projection_, down_;
  Dropout dropout1_, dropout2_;
};

// Splits a TiedLinear as the weight to which it is tied: by outputs if the weight is split along dimension 0, and by
// inputs if along dimension 1. Otherwise the layer is whole.
class ShardedTiedLinear : public torch::nn::Module, public Tied {
 public:
  // `input` says how the input lies on the ranks, and `how` how the weight is split, if at all. `outputs` is the whole
  // layer's number.
  ShardedTiedLinear(const TiedLinearImpl& whole, const Activation& input, const std::optional<SlicedDimension>& how,
                    int64_t outputs, const Rank& rank);
  at::Tensor forward(const at::Tensor& x);

 private:
  const Activation input_;
  const std::optional<int64_t> dim_;
  const int64_t outputs_;
  Rank rank_;
};

}  // namespace lockstep
