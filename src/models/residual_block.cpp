#include <lockstep/base/error.hpp>
#include <lockstep/models/residual_block.hpp>

#include "batch_norm_relu.hpp"
#include "conv2d.hpp"

#include <ostream>
#include <typeinfo>

namespace lockstep {
namespace {

torch::nn::Conv2d convolution(int64_t in, int64_t out, int64_t kernel, int64_t stride) {
  return torch::nn::Conv2d(
      torch::nn::Conv2dOptions(in, out, kernel).stride(stride).padding(kernel / 2).bias(/*new_bias=*/false));
}

// Makes a fresh norm for a clone, of the same kind as the original's norm.
torch::nn::AnyModule fresh(const torch::nn::AnyModule& norm, int64_t channels) {
  const bool other = !norm.is_empty() && dynamic_cast<torch::nn::BatchNorm2dImpl*>(norm.ptr().get()) == nullptr;
  return other ? norm.clone() : torch::nn::AnyModule(torch::nn::BatchNorm2d(channels));
}

// Computes relu(norm(x) + shortcut), or relu(norm(x)). Changes norm(x) in place: no backward needs it.
torch::Tensor norm_and_relu(torch::nn::AnyModule& norm, const torch::Tensor& x, const torch::Tensor& shortcut = {}) {
  torch::nn::Module& module = *norm.ptr();
  if (typeid(module) == typeid(torch::nn::BatchNorm2dImpl)) {
    return batch_norm_relu(static_cast<torch::nn::BatchNorm2dImpl&>(module), x, shortcut);
  }
  return add_and_relu(norm.forward(x), shortcut);
}

}  // namespace

ResidualBlockImpl::ResidualBlockImpl(int64_t in_channels, int64_t out_channels, int64_t stride)
    : in_channels_(in_channels), out_channels_(out_channels), stride_(stride) {
  if (in_channels < 1 || out_channels < 1 || stride < 1) {
    throw Error("ResidualBlock: all sizes must be at least 1; these are in_channels " + std::to_string(in_channels) +
                ", out_channels " + std::to_string(out_channels) + ", stride " + std::to_string(stride));
  }
  reset();
}

void ResidualBlockImpl::reset() {
  conv1 = register_module("conv1", convolution(in_channels_, out_channels_, 3, stride_));
  register_module("norm1", (norm1 = fresh(norm1, out_channels_)).ptr());
  conv2 = register_module("conv2", convolution(out_channels_, out_channels_, 3, 1));
  register_module("norm2", (norm2 = fresh(norm2, out_channels_)).ptr());
  shortcut = register_module("shortcut", torch::nn::Sequential());
  if (stride_ == 1 && in_channels_ == out_channels_) return;
  shortcut->push_back(convolution(in_channels_, out_channels_, 1, stride_));
  shortcut->push_back(torch::nn::BatchNorm2d(out_channels_));
}

torch::Tensor ResidualBlockImpl::forward(const torch::Tensor& x) {
  const torch::Tensor y = fast_conv2d(*conv2, norm_and_relu(norm1, fast_conv2d(*conv1, x)));
  return norm_and_relu(norm2, y, shortcut->is_empty() ? x : shortcut->forward(x));
}

void ResidualBlockImpl::pretty_print(std::ostream& out) const {
  out << "lockstep::ResidualBlock(" << in_channels_ << ", " << out_channels_ << ", stride=" << stride_ << ")";
}

}  // namespace lockstep
