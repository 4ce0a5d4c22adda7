// The layers of tensor parallelism: each is made from a whole layer, of which every rank of a group keeps a slice.
//
// Constructors copy this rank's slice to its device; the whole layer, equal on all ranks, stays as it is. Types, frozen
// parameters and the training flag are taken over. Nothing is drawn and nothing is sent. Of `total` channels or units
// rank i keeps part_of(total, i, world_size). Channels of images must divide by the number of ranks; units need not,
// but each rank needs one. In a group of one rank each layer is the whole one. What is said to be whole is equal on all
// ranks, to the bit on CPUs; so are gradients of parameters that every rank holds whole, such as a row-parallel layer's
// bias. A layer is used by its rank's thread only; the costs are those of its functions (parallel_functions.hpp).
// Constructors throw Error, on all ranks, for what cannot be split: the text says what would fit.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>
#include <lockstep/models/conv_relu_pool.hpp>
#include <lockstep/ranks/rank.hpp>
#include <lockstep/tensor_parallel/parallel_functions.hpp>

#include <cstdint>
#include <map>
#include <string>

namespace lockstep {

// Of a layer that is split by outputs.
struct OutputParallel {
  bool input_is_parallel = false;  // x is this rank's slice, and all slices are gathered first; false: x is whole
  bool gather_output = false;      // the result is whole; false: it is this rank's slice
};

// Of a layer that is split by inputs; its result is whole.
struct InputParallel {
  bool input_is_parallel = true;  // x is this rank's slice; false: x is whole, and the rank takes its slice
};

// What unshard asks a layer. For layers of your own as well.
class Sliced {
 public:
  virtual ~Sliced() = default;

  // By the tensor's name, the dimension that is split. Tensors that are not named are whole on every rank.
  const std::map<std::string, int64_t>& sliced_dimensions() const { return dimensions_; }

 protected:
  // This rank's slice of the whole layer's tensor `name`: a copy on the rank's device, and noted in
  // sliced_dimensions(). Throws Error if the rank would get nothing.
  at::Tensor slice(const std::string& name, const at::Tensor& whole, int64_t dim, const Rank& rank);

  std::map<std::string, int64_t> dimensions_;
};

// torch::nn::Linear by output units: weight [out / ranks, in], bias [out / ranks].
//   x        [..., in], or with input_is_parallel [..., in / ranks]
//   returns  [..., out / ranks], or with gather_output [..., out]
class ColumnParallelLinearImpl : public torch::nn::Module, public Sliced {
 public:
  ColumnParallelLinearImpl(const torch::nn::Linear& whole, Rank& rank, const OutputParallel& options = {});
  at::Tensor forward(const at::Tensor& x);

  at::Tensor weight, bias;  // bias undefined where the whole layer has none; so below

 private:
  Rank rank_;
  const OutputParallel options_;
  const int64_t in_, out_;  // the whole layer's
};
TORCH_MODULE(ColumnParallelLinear);

// torch::nn::Linear by input features: weight [out, in / ranks], bias [out], which is added once, to the sum.
//   x        [..., in / ranks], or without input_is_parallel [..., in]
//   returns  [..., out]
class RowParallelLinearImpl : public torch::nn::Module, public Sliced {
 public:
  RowParallelLinearImpl(const torch::nn::Linear& whole, Rank& rank, const InputParallel& options = {});
  at::Tensor forward(const at::Tensor& x);

  at::Tensor weight, bias;

 private:
  Rank rank_;
  const InputParallel options_;
};
TORCH_MODULE(RowParallelLinear);

// torch::nn::Conv2d by output channels: weight [out / ranks, in / groups, kernel...], bias [out / ranks].
//   x        [n, in, height, width], or with input_is_parallel [n, in / ranks, height, width]
//   returns  [n, out / ranks, ...], or with gather_output [n, out, ...]
// Groups that divide by the number of ranks: each rank computes whole groups from its own slice of the input, and
// nothing is gathered; this is what the two towers of AlexNet (Krizhevsky et al. 2012) are. A number of ranks that
// divides by the groups: several ranks share a group. Other groups, and padding other than zeros: Error.
class OutputChannelParallelConv2dImpl : public torch::nn::Module, public Sliced {
 public:
  OutputChannelParallelConv2dImpl(const torch::nn::Conv2d& whole, Rank& rank, const OutputParallel& options = {});
  at::Tensor forward(const at::Tensor& x);

  at::Tensor weight, bias;

 private:
  at::Tensor input_of_slice(const at::Tensor& x);  // the channels that this rank's outputs are computed from

  Rank rank_;
  const OutputParallel options_;
  const decltype(torch::nn::Conv2dImpl::options) whole_;
  const bool own_groups_;  // of at least one whole group
};
TORCH_MODULE(OutputChannelParallelConv2d);

// torch::nn::Conv2d by input channels: weight [out, in / ranks, kernel...], bias [out], which is added once, to the
// sum.
//   x        [n, in / ranks, height, width], or without input_is_parallel [n, in, height, width]
//   returns  [n, out, ...]
// For one group, and padding with zeros; else Error.
class InputChannelParallelConv2dImpl : public torch::nn::Module, public Sliced {
 public:
  InputChannelParallelConv2dImpl(const torch::nn::Conv2d& whole, Rank& rank, const InputParallel& options = {});
  at::Tensor forward(const at::Tensor& x);

  at::Tensor weight, bias;

 private:
  Rank rank_;
  const InputParallel options_;
  const decltype(torch::nn::Conv2dImpl::options) whole_;
};
TORCH_MODULE(InputChannelParallelConv2d);

// ConvReluPool by output channels; shapes as OutputChannelParallelConv2d's and conv_relu_pool's.
class OutputChannelParallelConvReluPoolImpl : public torch::nn::Module, public Sliced {
 public:
  OutputChannelParallelConvReluPoolImpl(const ConvReluPool& whole, Rank& rank, const OutputParallel& options = {});
  at::Tensor forward(const at::Tensor& x);

  at::Tensor weight, bias;

 private:
  Rank rank_;
  const OutputParallel options_;
  const int64_t in_, out_;  // the whole layer's channels
};
TORCH_MODULE(OutputChannelParallelConvReluPool);

// Batch normalisation of a slice of the channels: x [n, channels / ranks, ...]. A channel's statistics need no other
// channel, so nothing is sent.
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

}  // namespace lockstep
