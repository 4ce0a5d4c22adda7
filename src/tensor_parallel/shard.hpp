// Tensor parallelism: splits the work of each layer of a torch::nn::Sequential over the ranks of a group, by channels
// and units. The section's "Network Partitioning" calls this splitting layers.
//
// shard() makes this rank's net from a whole one. Its loss and gradients are those of the whole net on one device, up
// to the order of additions. Pass the same samples on every rank: others are an Error at the second step. Parameters
// that several ranks hold whole get equal gradients there, to the bit on CPUs, so the copies stay equal without
// exchange. (On GPUs the last bits can differ, where kernels add in a changing order, as cuDNN's may.)
//
// An activation is either whole, which means equal on all ranks, or in slices. Slices are by channels ([n, channels,
// height, width]) or by features ([..., features]). Layers that work value by value or channel by channel take slices
// as they are. Linear layers alternate: by output on whole inputs, by input on slices. So two layers need one sum.
// Flatten turns slices of channels into slices of features. Convolutions follow the TensorRule: `channels` splits them
// by output channel, and a convolution that needs all channels of a slice gathers them, which takes two exchanges of
// activations per two layers, in forward and in backward; `alternating` lets them alternate as linear layers do. Use it
// on its rank's thread only. Memory per rank: the slices of parameters and activations, and all that stays whole. Each
// exchange is one of parallel_functions.hpp.
#pragma once

#include <torch/nn/modules/container/sequential.h>
#include <lockstep/layout/model_split.hpp>
#include <lockstep/ranks/rank.hpp>

namespace lockstep {

// This rank's net for `net`, on rank.device(): a Sequential with the same names of layers and parameters, whose result
// is whole. Call it on all ranks, with equal nets; the net stays as it is, and nothing is shared with it. It takes
// Linear, Conv2d, ConvReluPool, BatchNorm1d and 2d, GroupNorm, LayerNorm, Embedding, MultiheadAttention, lockstep's
// Dropout, LibTorch's Dropout and Dropout2d, Flatten, poolings, Upsample, activation functions, ResidualBlock, the
// layers of a Gpt, TiedLinear, and Shardable modules. An Embedding is split by the features of its vectors. All
// dropouts become lockstep's, which drops the same on any number of ranks, and in training needs a SampleScope around
// forward. Layers with weights that are kept whole are cloned, which draws from LibTorch's default generator as their
// construction did. All ranks return after the last has drawn. Throws Error on all ranks, with the layer's name, for a
// type that it does not know, for numbers that cannot be split (the text says what would fit), and for a layer with
// weights that the net has twice.
torch::nn::Sequential shard(const torch::nn::Sequential& net, Rank& rank, TensorRule rule = TensorRule::channels);

// Gathers the weights and buffers of all ranks' nets into `net`, on every rank. Call it on all ranks, each with a net
// of its own that has the names and shapes of parameters of the net that was sharded. Throws Error for another net.
// Cost: one allgather per split tensor.
void unshard(const torch::nn::Sequential& sharded, Rank& rank, torch::nn::Sequential& net);

}  // namespace lockstep
