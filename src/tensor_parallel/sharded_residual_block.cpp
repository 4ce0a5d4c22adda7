#include "sharded_residual_block.hpp"

#include <lockstep/base/error.hpp>

#include "models/batch_norm_relu.hpp"

#include <memory>

namespace lockstep {
namespace {

torch::nn::BatchNorm2d batch_norm(const torch::nn::AnyModule& norm) {
  auto module = std::dynamic_pointer_cast<torch::nn::BatchNorm2dImpl>(norm.ptr());
  if (module) return module;
  throw Error("a ResidualBlock whose BatchNorms are synchronised over ranks cannot be split by channels");
}

}  // namespace

ShardedResidualBlock::ShardedResidualBlock(const ResidualBlockImpl& whole, Rank& rank)
    : conv1_(whole.conv1, rank),
      norm1_(batch_norm(whole.norm1), rank),
      conv2_(whole.conv2, rank),
      norm2_(whole_copy(batch_norm(whole.norm2), rank)),
      shortcut_(whole_copy(whole.shortcut, rank)) {
  register_module("conv1", conv1_);
  register_module("norm1", norm1_);
  register_module("conv2", conv2_);
  register_module("norm2", norm2_);
  register_module("shortcut", shortcut_);
  train(whole.is_training());
}

at::Tensor ShardedResidualBlock::forward(const at::Tensor& x) {
  const at::Tensor y = conv2_(batch_norm_relu(*norm1_, conv1_(x)));
  return batch_norm_relu(*norm2_, y, shortcut_->is_empty() ? x : shortcut_->forward(x));
}

}  // namespace lockstep
