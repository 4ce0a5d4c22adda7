// These are the layers of tensor parallelism. Each is made from a whole layer, of which every rank of a group keeps a
// slice. Build modules of your own from them for a SplitModel that splits by channels: see Shardable.
//
// Constructors copy this rank's slice to its device. The whole layer, equal on all ranks, stays as it is. Constructors
// take over types, frozen parameters and the training flag. They draw no random numbers and send nothing. Of n channels
// or units every rank keeps n / ranks, and the first n % ranks one more. Channels of images must divide by the number
// of ranks. Units need not, but each rank needs at least one. In a group of one rank each layer is the whole one.
//
// "Whole" tensors are equal on all ranks, to the bit on CPUs. So are gradients of parameters that every rank holds
// whole, such as a row-parallel layer's bias. Use a layer on its rank's thread only. A layer's cost is that of its
// functions (parallel_functions.hpp). Constructors throw Error, on all ranks, for what cannot be split. The text says
// what would fit. The layers' gradients are those of slices, so clip them by the Optimizer of a SplitModel. In a net
// that you put together without one, LibTorch's clip_grad_norm_ takes the norm of a slice.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/pimpl.h>
#include <lockstep/models/conv_relu_pool.hpp>
#include <lockstep/ranks/functional.hpp>
#include <lockstep/ranks/rank.hpp>

#include <cstdint>
#include <map>
#include <memory>
#include <string>

namespace lockstep {

// Derive modules of your own in a SplitModel's Sequential from this class, beside torch::nn::Module. Such a module says
// itself which slices a rank holds.
class Shardable {
 public:
  virtual ~Shardable() = default;

  // Makes a module that takes whole inputs and gives whole results. Its parameters have the same names as this one's.
  // Build it from the layers below and those of parallel_transformer.hpp, and take whole_copy() of all else; a layer
  // that cannot be split is such a copy altogether. Do not communicate in this function.
  virtual torch::nn::AnyModule shard(Rank& rank) const = 0;
};

// Says how a tensor is split.
struct SlicedDimension {
  int64_t dim = 0;
  // The number of equal blocks that lie one after the other along `dim`; each block is split. An attention's
  // in_proj_weight has three, for queries, keys and values.
  int64_t blocks = 1;
};

// This is the base class of layers that hold slices. You may derive layers of your own from it too.
class Sliced {
 public:
  virtual ~Sliced() = default;

  // Tells how tensors are split, by the tensor's name. Every rank holds all other tensors whole.
  const std::map<std::string, SlicedDimension>& sliced_dimensions() const { return dimensions_; }

 protected:
  // Copies this rank's slice of the whole layer's tensor `name` to the rank's device, and notes `how` in
  // sliced_dimensions(). Throws Error if the rank would get nothing.
  at::Tensor slice(const std::string& name, const at::Tensor& whole, const SlicedDimension& how, const Rank& rank);
  at::Tensor slice(const std::string& name, const at::Tensor& whole, int64_t dim, const Rank& rank) {
    return slice(name, whole, SlicedDimension{.dim = dim}, rank);
  }

  // Call this in forward with an input that all ranks of the group must pass whole. In the calls 2, 4, 8, … (on a GPU
  // in the first three of these) it compares x over the group. Throws Error, on all ranks, if x differs.
  void compare_input(const at::Tensor& x, Rank& rank);

  std::map<std::string, SlicedDimension> dimensions_;

 private:
  int64_t inputs_ = 0;
};

// Copies a layer that every rank holds whole to rank.device(), for blocks of your own. The copy has the layer's mode,
// and the same parameters are frozen. Throws c10::Error for a module that cannot be cloned.
std::shared_ptr<torch::nn::Module> whole_copy(const torch::nn::Module& layer, const Rank& rank);
template <class Module>
std::shared_ptr<Module> whole_copy(const torch::nn::ModuleHolder<Module>& layer, const Rank& rank) {
  return std::static_pointer_cast<Module>(whole_copy(*layer, rank));
}

// Computes a torch::nn::Linear, split by output units: weight [out / ranks, in], bias [out / ranks]. With `blocks`, as
// in SlicedDimension, each block of the units is split: 3 for a layer that makes queries, keys and values in one.
//   x        [..., in]
//   returns  [..., out / ranks]
class ColumnParallelLinearImpl : public torch::nn::Module, public Sliced {
 public:
  ColumnParallelLinearImpl(const torch::nn::Linear& whole, Rank& rank, int64_t blocks = 1);
  at::Tensor forward(const at::Tensor& x);

  at::Tensor weight, bias;  // bias is undefined if the whole layer has none; the same below

 private:
  Rank rank_;
};
TORCH_MODULE(ColumnParallelLinear);

// Computes a torch::nn::Linear, split by input features: weight [out, in / ranks], bias [out], which is added once, to
// the sum.
//   x        [..., in / ranks]
//   returns  [..., out]
class RowParallelLinearImpl : public torch::nn::Module, public Sliced {
 public:
  RowParallelLinearImpl(const torch::nn::Linear& whole, Rank& rank);
  at::Tensor forward(const at::Tensor& x);

  at::Tensor weight, bias;

 private:
  Rank rank_;
};
TORCH_MODULE(RowParallelLinear);

// Computes a torch::nn::Conv2d, split by output channels: weight [out / ranks, in / groups, kernel...], bias [out /
// ranks].
//   x        [n, in, height, width]; or with input_is_parallel this rank's slice, [n, in / ranks, height, width]
//   returns  [n, out / ranks, ...]
// If the number of groups is a multiple of the ranks', each rank computes whole groups from its own slice of the input,
// and nothing is gathered. AlexNet's two towers are such groups (Krizhevsky et al. 2012). If the number of ranks is a
// multiple of the groups', several ranks share a group. Throws Error for other groups, and for padding other than
// zeros.
class OutputChannelParallelConv2dImpl : public torch::nn::Module, public Sliced {
 public:
  OutputChannelParallelConv2dImpl(const torch::nn::Conv2d& whole, Rank& rank, bool input_is_parallel = false);
  at::Tensor forward(const at::Tensor& x);

  at::Tensor weight, bias;

 private:
  at::Tensor input_of_slice(const at::Tensor& x);  // gives the channels for this rank's outputs

  Rank rank_;
  const bool input_is_parallel_;
  const decltype(torch::nn::Conv2dImpl::options) whole_;
  const bool own_groups_;  // true: each rank has its own whole groups
};
TORCH_MODULE(OutputChannelParallelConv2d);

// Computes a torch::nn::Conv2d, split by input channels: weight [out, in / ranks, kernel...], bias [out], which is
// added once, to the sum.
//   x        [n, in / ranks, height, width]
//   returns  [n, out, ...]
// Throws Error for more than one group, and for padding other than zeros.
class InputChannelParallelConv2dImpl : public torch::nn::Module, public Sliced {
 public:
  InputChannelParallelConv2dImpl(const torch::nn::Conv2d& whole, Rank& rank);
  at::Tensor forward(const at::Tensor& x);

  at::Tensor weight, bias;

 private:
  Rank rank_;
  const decltype(torch::nn::Conv2dImpl::options) whole_;
};
TORCH_MODULE(InputChannelParallelConv2d);

// Computes a ConvReluPool, split by output channels; shapes are as for OutputChannelParallelConv2d and conv_relu_pool.
class OutputChannelParallelConvReluPoolImpl : public torch::nn::Module, public Sliced {
 public:
  OutputChannelParallelConvReluPoolImpl(const ConvReluPool& whole, Rank& rank, bool input_is_parallel = false);
  at::Tensor forward(const at::Tensor& x);

  at::Tensor weight, bias;

 private:
  Rank rank_;
  const bool input_is_parallel_;
  const int64_t in_;  // the whole layer's number of input channels
};
TORCH_MODULE(OutputChannelParallelConvReluPool);

// Computes batch normalisation of a slice of the channels: x [n, channels / ranks, ...]. A channel's statistics need no
// other channel, so nothing is sent.
class ParallelBatchNorm1dImpl : public torch::nn::BatchNorm1dImpl, public Sliced {
 public:
  ParallelBatchNorm1dImpl(const torch::nn::BatchNorm1d& whole, Rank& rank);
};
TORCH_MODULE(ParallelBatchNorm1d);

class ParallelBatchNorm2dImpl : public torch::nn::BatchNorm2dImpl, public Sliced {
 public:
  ParallelBatchNorm2dImpl(const torch::nn::BatchNorm2d& whole, Rank& rank);
};
TORCH_MODULE(ParallelBatchNorm2d);

// Computes group normalisation of a slice of the channels: x [n, channels / ranks, ...]. Each rank has whole groups, so
// nothing is sent. Throws Error if the groups do not divide by the number of ranks.
class ParallelGroupNormImpl : public torch::nn::GroupNormImpl, public Sliced {
 public:
  ParallelGroupNormImpl(const torch::nn::GroupNorm& whole, Rank& rank);
};
TORCH_MODULE(ParallelGroupNorm);

}  // namespace lockstep
