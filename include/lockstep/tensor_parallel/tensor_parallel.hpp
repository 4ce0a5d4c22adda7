// Tensor parallelism of a torch::nn::Sequential: each layer's work is split over the ranks of a group by channels and
// units, which the section's "Network Partitioning" calls splitting layers.
//
// shard() makes this rank's part of a net; the result trains like any module, with the same loss and gradients as the
// whole net on one device (up to the order of additions). Every rank is given the same samples. Parameters that several
// ranks hold whole get equal gradients there, to the bit on CPUs (GPU kernels that add in a changing order, as cuDNN's
// may, can differ in the last bits), so the copies stay equal without exchange. An activation is either whole, which
// means equal on all ranks, or in slices: by channels ([n, channels, height, width]) or by features ([..., features]).
// Layers that work value by value or channel by channel take slices as they are. Used by its rank's thread only. Memory
// per rank: the slices, what stays whole, and slices of activations. Each exchange is one of parallel_functions.hpp.
#pragma once

#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/container/sequential.h>
#include <lockstep/ranks/rank.hpp>
#include <lockstep/tensor_parallel/parallel_layers.hpp>

#include <map>
#include <string>

namespace lockstep {

enum class LayerSplit {
  output,  // by units or output channels: the result is in slices
  input,   // by input features or channels: the result is whole
  whole,   // not: every rank computes all of it, from a whole input
};

// Which layer is split how. Linear layers alternate by default: on whole inputs by output, on slices by input, which
// needs one sum for two layers. Flatten keeps slices of channels together as slices of features.
struct ShardRule {
  // Convolutions by output channel; one that needs all channels of a slice gathers them (two exchanges of activations
  // per two layers, in forward and in backward).
  static ShardRule by_output_channels() { return {}; }
  // Convolutions alternate as linear layers do: by output on whole inputs, by input on slices (one sum per two layers).
  static ShardRule alternating() { return {.convolutions_alternate = true}; }

  // The same rule with an entry for one layer: rule.with("fc2", LayerSplit::whole).
  ShardRule with(const std::string& layer, LayerSplit split) const;

  bool convolutions_alternate = false;
  std::map<std::string, LayerSplit> layers = {};  // by name; the others follow the rule
};

struct ShardOptions {
  ShardRule rule = {};
  // Whether the net's result is whole; false leaves it as the last layer gives it, as parallel_cross_entropy takes it.
  bool gather_output = true;
};

// For modules of your own in a Sequential: derive from it beside torch::nn::Module, and the module says what a rank
// holds of it.
class Shardable {
 public:
  virtual ~Shardable() = default;

  // A module that takes whole inputs and gives whole results, its parameters under the same names as this one's. It may
  // be built of the layers of parallel_layers.hpp; other parts are copied, on rank.device(). Must not communicate.
  virtual torch::nn::AnyModule shard(Rank& rank) const = 0;
};

// This rank's part of `net`, on rank.device(): a Sequential with the same names of layers and parameters. All ranks
// must call it with equal nets and options; the net stays as it is, and nothing is shared with it. It takes Linear,
// Conv2d, ConvReluPool, BatchNorm1d and 2d, lockstep's Dropout, LibTorch's Dropout and Dropout2d, Flatten, poolings,
// Upsample, activation functions, ResidualBlock, and what is Shardable. All dropouts become lockstep's, which drops the
// same on any number of ranks, and in training needs a SampleScope around forward. What has weights and is kept whole
// is cloned, which draws from LibTorch's default generator as its construction did. All ranks return after the last has
// drawn. Throws Error on all ranks, with the layer's name: a type that it does not know, numbers that cannot be split
// (the text says what would fit), a layer with weights that the net has twice, an entry of the rule that names no
// layer, or one that the layer cannot follow.
torch::nn::Sequential shard(const torch::nn::Sequential& net, Rank& rank, const ShardOptions& options = {});

// Gathers the weights and buffers of all ranks' parts into `net`, on every rank: for checkpoints, evaluation on one
// device, or another split. All ranks must call it, each with a net of its own that has the parameters' names and
// shapes of the one that was sharded. Throws Error: another net. Cost: one allgather per split tensor.
void unshard(const torch::nn::Sequential& sharded, Rank& rank, torch::nn::Sequential& net);

// The same for .grad; a parameter without a gradient has none in `net` either.
void unshard_gradients(const torch::nn::Sequential& sharded, Rank& rank, torch::nn::Sequential& net);

}  // namespace lockstep
