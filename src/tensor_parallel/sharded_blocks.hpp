// shard() puts these modules into a net, beside the parallel layers. Gathered computes a layer between slices. Others
// are one rank's slices of a ResidualBlock, of a Gpt's layers, and of any layer that is tied to another's weight.
//
// A block's slice takes whole activations and gives whole ones. So a Gpt's block makes two sums over the ranks in
// forward and two in backward (Shoeybi et al. 2019, "Megatron-LM", section 3), and a ResidualBlock one in each.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/normalization.h>
#include <lockstep/models/gpt.hpp>
#include <lockstep/models/residual_block.hpp>
#include <lockstep/models/tied_linear.hpp>
#include <lockstep/ranks/rank.hpp>
#include <lockstep/tensor_parallel/parallel_layers.hpp>
#include <lockstep/tensor_parallel/parallel_transformer.hpp>

#include <cstdint>
#include <optional>

namespace lockstep {

// Says how an activation lies on the ranks.
struct Activation {
  bool in_slices = false;  // false: whole
  int64_t dim = -1;   // the split dimension: 1 of [n, channels, height, width], or the last, which has the features
  int64_t total = 0;  // the dimension's whole size; rank i has part_of(total, i, world_size); 0: slices are equal

  at::Tensor gathered(const at::Tensor& x, Rank& rank) const;
};

// Calls `layer`, and gathers its input, the result, or neither. All ranks compute the same afterwards. Parameters,
// buffers and children have the layer's own names, as if Gathered were the layer.
class GatheredImpl : public torch::nn::Module, public Sliced {
 public:
  GatheredImpl(torch::nn::AnyModule layer, const Activation& input, const Activation& output, const Rank& rank);

  at::Tensor forward(const at::Tensor& x);
  void train(bool on = true) override;

 private:
  torch::nn::AnyModule layer_;
  const Activation input_, output_;
  Rank rank_;
};
TORCH_MODULE(Gathered);

// conv1 is split by output channels, norm1 works on their slice, conv2 is split by input channels. norm2 and the short
// cut are whole on every rank.
class ShardedResidualBlock : public torch::nn::Module {
 public:
  // Throws Error for output channels that do not divide by the number of ranks.
  ShardedResidualBlock(const ResidualBlockImpl& whole, Rank& rank);
  at::Tensor forward(const at::Tensor& x);

 private:
  OutputChannelParallelConv2d conv1_;
  ParallelBatchNorm2d norm1_;
  InputChannelParallelConv2d conv2_;
  torch::nn::BatchNorm2d norm2_;
  torch::nn::Sequential shortcut_;
};

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
