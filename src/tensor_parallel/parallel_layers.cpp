#include <torch/nn/functional/conv.h>
#include <lockstep/base/error.hpp>
#include <lockstep/models/linear.hpp>
#include <lockstep/tensor_parallel/parallel_layers.hpp>

#include <variant>

#include "base/classic.hpp"
#include "data/parts.hpp"
#include "layer_slices.hpp"
#include "ranks/equal_input.hpp"
#include "shard.hpp"

namespace lockstep {
namespace {

using at::Tensor;
namespace F = torch::nn::functional;
using ConvolutionOptions = decltype(torch::nn::Conv2dImpl::options);

void check_channels(const char* layer, const char* which, int64_t channels, const Rank& rank) {
  const int count = rank.world_size();
  if (channels % count == 0) return;
  const int64_t below = channels / count * count;
  throw Error(std::string(layer) + ": " + std::to_string(channels) + " " + which + " channels do not divide over " +
              ranks_text(count) + ". These numbers of ranks would fit: " + divisors_of(channels) +
              "; these channels: " + (below > 0 ? std::to_string(below) + " or " : "") + std::to_string(below + count) +
              kOrKeepWhole);
}

void check_padding(const char* layer, const ConvolutionOptions& options) {
  if (std::holds_alternative<torch::enumtype::kZeros>(options.padding_mode())) return;
  throw Error(std::string(layer) + ": only padding with zeros can be split" + kOrKeepWhole);
}

// Each rank needs whole groups, or each group needs whole ranks.
void check_groups(const ConvolutionOptions& options, const Rank& rank) {
  const int64_t groups = options.groups(), count = rank.world_size();
  if (groups % count == 0 || count % groups == 0) return;
  throw Error("OutputChannelParallelConv2d: " + std::to_string(groups) + " groups over " +
              ranks_text(rank.world_size()) + ": neither divides the other. These numbers of ranks would fit: " +
              divisors_of(groups) + " and multiples of " + std::to_string(groups) + kOrKeepWhole);
}

void check_blocks(int64_t units, int64_t blocks) {
  if (blocks >= 1 && units % blocks == 0) return;
  throw Error("ColumnParallelLinear: " + std::to_string(units) + " units in " + std::to_string(blocks) +
              " blocks: the units must be a multiple of the blocks");
}

Tensor convolve(const Tensor& x, const Tensor& weight, const Tensor& bias, const ConvolutionOptions& whole,
                int64_t groups) {
  return F::conv2d(x, weight,
                   F::Conv2dFuncOptions()
                       .bias(bias)
                       .stride(whole.stride())
                       .padding(whole.padding())
                       .dilation(whole.dilation())
                       .groups(groups));
}

}  // namespace

Tensor Sliced::slice(const std::string& name, const Tensor& whole, const SlicedDimension& how, const Rank& rank) {
  const int64_t size = whole.size(how.dim) / how.blocks;
  if (size < rank.world_size()) {
    throw Error("dimension " + std::to_string(how.dim) + " of " + name + ", of size " + std::to_string(size) +
                ", does not go round " + ranks_text(rank.world_size()) + ". At most " + std::to_string(size) +
                " would fit" + kOrKeepWhole);
  }
  dimensions_[name] = how;
  const Range range = part_of(size, rank.index(), rank.world_size());
  return copy_for(rank, slice_of_whole(whole, how, range.begin, range.size()));
}

void Sliced::compare_input(const Tensor& x, Rank& rank) {
  const auto other = rank_with_another_input(x, rank, ++inputs_);
  if (!other) return;
  throw Error(
      rank.name() + ": shard: the ranks that share a layer's work must pass it the same samples, and rank " +
          std::to_string(*other) + " of the group passes others than rank 0 (here " + classic_text(x.sizes()) +
          "), so slices of different samples would be added. Call batches(…) without the rank, or with the mesh's "
          "data axis (net.mesh().data()); a loader of your own must give all ranks of the group the same batches. If "
          "the "
          "samples are the same, the ranks' nets were not: make them with one seed, within rank.in_turn()",
      {Error::difference});
}

// ---- Linear --------------------------------------------------------------------------------------------------------

ColumnParallelLinearImpl::ColumnParallelLinearImpl(const torch::nn::Linear& whole, Rank& rank, int64_t blocks)
    : rank_(rank) {
  check_blocks(whole->weight.size(0), blocks);
  const SlicedDimension how{.dim = 0, .blocks = blocks};
  weight = register_parameter("weight", slice("weight", whole->weight, how, rank), is_trained(whole->weight));
  const Tensor its_slice = whole->bias.defined() ? slice("bias", whole->bias, how, rank) : Tensor();
  bias = register_parameter("bias", its_slice, is_trained(whole->bias));
  train(whole->is_training());
}

Tensor ColumnParallelLinearImpl::forward(const Tensor& x) {
  compare_input(x, rank_);
  return fast_linear(copy_to_group(x, rank_), weight, bias);
}

RowParallelLinearImpl::RowParallelLinearImpl(const torch::nn::Linear& whole, Rank& rank) : rank_(rank) {
  weight = register_parameter("weight", slice("weight", whole->weight, 1, rank), is_trained(whole->weight));
  bias = register_parameter("bias", copy_for(rank, whole->bias), is_trained(whole->bias));
  train(whole->is_training());
}

Tensor RowParallelLinearImpl::forward(const Tensor& x) {
  const Tensor y = reduce_from_group(fast_linear(x, weight), rank_);
  return bias.defined() ? y + bias : y;
}

// ---- Conv2d --------------------------------------------------------------------------------------------------------

OutputChannelParallelConv2dImpl::OutputChannelParallelConv2dImpl(const torch::nn::Conv2d& whole, Rank& rank,
                                                                 bool input_is_parallel)
    : rank_(rank),
      input_is_parallel_(input_is_parallel),
      whole_(whole->options),
      own_groups_(whole_.groups() > 1 && whole_.groups() % rank.world_size() == 0) {
  check_padding("OutputChannelParallelConv2d", whole_);
  check_groups(whole_, rank);
  check_channels("OutputChannelParallelConv2d", "output", whole_.out_channels(), rank);
  weight = register_parameter("weight", slice("weight", whole->weight, 0, rank), is_trained(whole->weight));
  const Tensor its_slice = whole->bias.defined() ? slice("bias", whole->bias, 0, rank) : Tensor();
  bias = register_parameter("bias", its_slice, is_trained(whole->bias));
  train(whole->is_training());
}

Tensor OutputChannelParallelConv2dImpl::input_of_slice(const Tensor& x) {
  if (own_groups_) return input_is_parallel_ ? x : scatter_to_group(x, 1, rank_);
  const Tensor all =
      input_is_parallel_ ? allgather_with_gradient(x, rank_, 1, whole_.in_channels()) : copy_to_group(x, rank_);
  if (whole_.groups() == 1) return all;
  const int64_t group = rank_.index() / (rank_.world_size() / whole_.groups());
  const int64_t channels = whole_.in_channels() / whole_.groups();
  return all.narrow(1, group * channels, channels);
}

Tensor OutputChannelParallelConv2dImpl::forward(const Tensor& x) {
  if (!input_is_parallel_) compare_input(x, rank_);
  const int64_t groups = own_groups_ ? whole_.groups() / rank_.world_size() : 1;
  return convolve(input_of_slice(x), weight, bias, whole_, groups);
}

InputChannelParallelConv2dImpl::InputChannelParallelConv2dImpl(const torch::nn::Conv2d& whole, Rank& rank)
    : rank_(rank), whole_(whole->options) {
  check_padding("InputChannelParallelConv2d", whole_);
  if (whole_.groups() != 1) {
    throw Error("InputChannelParallelConv2d: a convolution in " + std::to_string(whole_.groups()) +
                " groups cannot be split by input channels; split it by output channels" + kOrKeepWhole);
  }
  check_channels("InputChannelParallelConv2d", "input", whole_.in_channels(), rank);
  weight = register_parameter("weight", slice("weight", whole->weight, 1, rank), is_trained(whole->weight));
  bias = register_parameter("bias", copy_for(rank, whole->bias), is_trained(whole->bias));
  train(whole->is_training());
}

Tensor InputChannelParallelConv2dImpl::forward(const Tensor& x) {
  const Tensor y = reduce_from_group(convolve(x, weight, Tensor(), whole_, /*groups=*/1), rank_);
  return bias.defined() ? y + bias.view({1, -1, 1, 1}) : y;
}

OutputChannelParallelConvReluPoolImpl::OutputChannelParallelConvReluPoolImpl(const ConvReluPool& whole, Rank& rank,
                                                                             bool input_is_parallel)
    : rank_(rank), input_is_parallel_(input_is_parallel), in_(whole->weight.size(1)) {
  check_channels("OutputChannelParallelConvReluPool", "output", whole->weight.size(0), rank);
  weight = register_parameter("weight", slice("weight", whole->weight, 0, rank), is_trained(whole->weight));
  bias = register_parameter("bias", slice("bias", whole->bias, 0, rank), is_trained(whole->bias));
  train(whole->is_training());
}

Tensor OutputChannelParallelConvReluPoolImpl::forward(const Tensor& x) {
  if (!input_is_parallel_) compare_input(x, rank_);
  const Tensor all = input_is_parallel_ ? allgather_with_gradient(x, rank_, 1, in_) : copy_to_group(x, rank_);
  return conv_relu_pool(all, weight, bias);
}

// ---- BatchNorm, GroupNorm ------------------------------------------------------------------------------------------

namespace {

torch::nn::BatchNormOptions options_of_slice(torch::nn::BatchNormOptions options, const Rank& rank) {
  return options.num_features(part_of(options.num_features(), rank.index(), rank.world_size()).size());
}

// LibTorch has made the slice's tensors on the CPU in float32. This sets their values, types and device.
// take(name, tensor) gives this rank's slice of the whole layer's tensor.
template <class Take>
void fill(torch::nn::Module& slice, const torch::nn::Module& whole, const Take& take) {
  auto parameters = slice.named_parameters(/*recurse=*/false), buffers = slice.named_buffers(/*recurse=*/false);
  for (const auto& item : whole.named_parameters(/*recurse=*/false)) {
    parameters[item.key()].set_data(take(item.key(), item.value()));
    parameters[item.key()].requires_grad_(item.value().requires_grad());
  }
  for (const auto& item : whole.named_buffers(/*recurse=*/false)) {
    buffers[item.key()].set_data(take(item.key(), item.value()));
  }
  slice.train(whole.is_training());
}

torch::nn::GroupNormOptions options_of_slice(const torch::nn::GroupNormOptions& whole, const Rank& rank) {
  const int64_t groups = whole.num_groups();
  if (groups % rank.world_size() == 0) {
    return torch::nn::GroupNormOptions(groups / rank.world_size(), whole.num_channels() / rank.world_size())
        .eps(whole.eps())
        .affine(whole.affine());
  }
  throw Error("ParallelGroupNorm: " + std::to_string(groups) + " groups do not divide over " +
              ranks_text(rank.world_size()) + ". These numbers of ranks would fit: " + divisors_of(groups) +
              kOrKeepWhole);
}

}  // namespace

ParallelBatchNorm1dImpl::ParallelBatchNorm1dImpl(const torch::nn::BatchNorm1d& whole, Rank& rank)
    : BatchNorm1dImpl(options_of_slice(whole->options, rank)) {
  fill(*this, *whole, [&](const std::string& name, const Tensor& tensor) {  // the count of batches has no channels
    return tensor.dim() == 0 ? copy_for(rank, tensor) : slice(name, tensor, 0, rank);
  });
}

ParallelBatchNorm2dImpl::ParallelBatchNorm2dImpl(const torch::nn::BatchNorm2d& whole, Rank& rank)
    : BatchNorm2dImpl(options_of_slice(whole->options, rank)) {
  fill(*this, *whole, [&](const std::string& name, const Tensor& tensor) {
    return tensor.dim() == 0 ? copy_for(rank, tensor) : slice(name, tensor, 0, rank);
  });
}

ParallelGroupNormImpl::ParallelGroupNormImpl(const torch::nn::GroupNorm& whole, Rank& rank)
    : GroupNormImpl(options_of_slice(whole->options, rank)) {
  fill(*this, *whole, [&](const std::string& name, const Tensor& tensor) { return slice(name, tensor, 0, rank); });
}

}  // namespace lockstep
