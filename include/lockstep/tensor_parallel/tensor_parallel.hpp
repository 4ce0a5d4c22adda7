// Tensor parallelism: splits the work of each layer of a torch::nn::Sequential over the ranks of a group, by channels
// and units. The section's "Network Partitioning" calls this splitting layers.
//
// shard() makes this rank's net from a whole one. The result trains like any module. Its loss and gradients are those
// of the whole net on one device, up to the order of additions. Pass the same samples on every rank: others are an
// Error at the second step. Parameters that several ranks hold whole get equal gradients there, to the bit on CPUs, so
// the copies stay equal without exchange. (On GPUs the last bits can differ, where kernels add in a changing order, as
// cuDNN's may.)
// cuDNN's may.)
//
// An activation is either whole, which means equal on all ranks, or in slices. Slices are by channels ([n, channels,
// height, width]) or by features ([..., features]). Layers that work value by value or channel by channel take slices
// as they are. Use it on its rank's thread only. Memory per rank: the slices of parameters and activations, and all
// that stays whole. Each exchange is one of parallel_functions.hpp.
#pragma once

#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/container/sequential.h>
#include <lockstep/ranks/rank.hpp>
#include <lockstep/tensor_parallel/parallel_layers.hpp>

#include <map>
#include <string>

namespace lockstep {

enum class LayerSplit {
  output,  // split by units, output channels or an embedding's features: the result is in slices
  input,   // split by input features, channels or an embedding's vocabulary: the result is whole
  whole,   // not split: every rank computes all of it, from a whole input
};

// Says how each layer is split. By default linear layers alternate: by output on whole inputs, by input on slices. So
// two layers need one sum. Flatten turns slices of channels into slices of features.
struct ShardRule {
  // Splits convolutions by output channel. A convolution that needs all channels of a slice gathers them. This takes
  // two exchanges of activations per two layers, in forward and in backward.
  static ShardRule by_output_channels() { return {}; }
  // Lets convolutions alternate as linear layers do: by output on whole inputs, by input on slices (one sum per two
  // layers).
  static ShardRule alternating() { return {.convolutions_alternate = true}; }

  // The same rule with an entry for one layer: rule.with("fc2", LayerSplit::whole).
  ShardRule with(const std::string& layer, LayerSplit split) const;

  bool convolutions_alternate = false;
  std::map<std::string, LayerSplit> layers = {};  // by name; the others follow the rule
};

struct ShardOptions {
  ShardRule rule = {};
  // true: the net's result is whole. false: the result stays as the last layer gives it, and as parallel_cross_entropy
  // takes it.
  bool gather_output = true;
};

// Base class for modules of your own in a Sequential: derive from it beside torch::nn::Module. The module then says
// itself what a rank holds of it.
class Shardable {
 public:
  virtual ~Shardable() = default;

  // Makes a module that takes whole inputs and gives whole results. Its parameters have the same names as this one's.
  // Build it from the layers of parallel_layers.hpp and parallel_transformer.hpp, and copy all else to rank.device().
  // This function must not communicate.
  virtual torch::nn::AnyModule shard(Rank& rank) const = 0;
};

// This rank's net for `net`, on rank.device(): a Sequential with the same names of layers and parameters. All ranks
// must call it with equal nets and options; the net stays as it is, and nothing is shared with it. It takes Linear,
// Conv2d, ConvReluPool, BatchNorm1d and 2d, GroupNorm, LayerNorm, Embedding, MultiheadAttention, lockstep's Dropout,
// LibTorch's Dropout and Dropout2d, Flatten, poolings, Upsample, activation functions, ResidualBlock, the layers of a
// Gpt, TiedLinear, and Shardable modules. An Embedding is split by the features of its vectors, or if the rule says
// LayerSplit::input, by its vocabulary. All dropouts become lockstep's, which drops the same on any number of ranks,
// and in training needs a SampleScope around forward.
// Layers with weights that are kept whole are cloned, which draws from LibTorch's default generator as their
// construction did. All ranks return after the last has drawn. Throws Error on all ranks, with the layer's name, for a
// type that it does not know, for numbers that cannot be split (the text says what would fit), and for a layer with
// weights that the net has twice. So it does for an entry of the rule that names no layer, or that the layer cannot
// follow.
torch::nn::Sequential shard(const torch::nn::Sequential& net, Rank& rank, const ShardOptions& options = {});

// Gathers the weights and buffers of all ranks' nets into `net`, on every rank. Use it for checkpoints, evaluation on
// one device, or another split. All ranks must call it. Each passes a net of its own, with the names and shapes of
// parameters of the net that was sharded. Throws Error for another net. Cost: one allgather per split tensor.
void unshard(const torch::nn::Sequential& sharded, Rank& rank, torch::nn::Sequential& net);

// The same for .grad; a parameter without a gradient has none in `net` either.
void unshard_gradients(const torch::nn::Sequential& sharded, Rank& rank, torch::nn::Sequential& net);

}  // namespace lockstep
