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
// Flatten turns slices of channels into slices of features. Convolutions follow the TensorRule. `channels` splits them
// by output channel. A convolution that needs all channels of a slice gathers them. This takes two exchanges of
// activations per two layers, in forward and in backward. `alternating` lets convolutions alternate as linear layers
// do. Use the net on its rank's thread only. A rank's memory has the slices of parameters and activations, and all that
// stays whole. Each exchange is one of ranks/functional.hpp.
#pragma once

#include <torch/nn/modules/container/sequential.h>
#include <lockstep/layout/model_split.hpp>
#include <lockstep/ranks/rank.hpp>
#include <lockstep/tensor_parallel/parallel_layers.hpp>

#include <cstdint>
#include <map>
#include <string>

namespace lockstep {

// Makes this rank's net of `net`, on rank.device(): a Sequential with the same names of layers and parameters, whose
// result is whole. Call it on all ranks, with equal nets; the net does not change, and nothing is shared with it. It
// takes Linear, Conv2d, ConvReluPool, BatchNorm1d and 2d, GroupNorm, LayerNorm, Embedding, MultiheadAttention,
// lockstep's Dropout, LibTorch's Dropout and Dropout2d, Flatten, poolings, Upsample, activation functions,
// ResidualBlock, the layers of a Gpt, TiedLinear, and Shardable modules. An Embedding is split by the features of its
// vectors. All dropouts become lockstep's, which drops the same on any number of ranks, and in training needs a
// SampleScope around forward. Layers with weights that are kept whole are cloned, which draws from LibTorch's default
// generator as their construction did. All ranks return after the last has drawn. Throws Error on all ranks, with the
// layer's name, for an unknown type, and for a layer with weights that the net has twice. So it does for numbers that
// cannot be split; the text says what would fit.
torch::nn::Sequential shard(const torch::nn::Sequential& net, Rank& rank, TensorRule rule = TensorRule::channels);

// Gathers the weights and buffers of all ranks' nets into `net`, on every rank. Call it on all ranks. Each passes a net
// of its own, whose parameters have the names and shapes of the net given to shard(). Throws Error for another net. It
// costs one allgather per split tensor.
void unshard(const torch::nn::Sequential& sharded, Rank& rank, torch::nn::Sequential& net);

// Tells how each split tensor is split, by its name in the net.
std::map<std::string, SlicedDimension> sliced_dimensions_of(const torch::nn::Sequential& sharded);

// Takes `size` values of each block along the dimension, from the block's `begin` on. The result is a copy only if
// there are several blocks.
at::Tensor slice_of_whole(const at::Tensor& whole, const SlicedDimension& how, int64_t begin, int64_t size);

// Joins the ranks' slices of a tensor whose size along the dimension is `total`. Call it on all ranks. Throws Error
// for a slice of another size, as gather_from_group does.
at::Tensor joined_slices(const at::Tensor& slice, const SlicedDimension& how, Rank& rank, int64_t total);

}  // namespace lockstep
