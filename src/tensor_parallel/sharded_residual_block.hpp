// ShardedResidualBlock is one rank's slice of a ResidualBlock. conv1 is split by output channels, norm1 works on their
// slice, conv2 is split by input channels. This makes one sum over the ranks in forward, one in backward. norm2 and the
// short cut are whole on every rank.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <lockstep/models/residual_block.hpp>
#include <lockstep/ranks/rank.hpp>
#include <lockstep/tensor_parallel/parallel_layers.hpp>

namespace lockstep {

class ShardedResidualBlock : public torch::nn::Module {
 public:
  // Throws Error for output channels that do not divide by the number of ranks.
  ShardedResidualBlock(const ResidualBlockImpl& whole, Rank& rank);

  at::Tensor forward(const at::Tensor& x);  // maps a whole x to a whole result, as the whole block does

 private:
  OutputChannelParallelConv2d conv1_;
  ParallelBatchNorm2d norm1_;
  InputChannelParallelConv2d conv2_;
  torch::nn::BatchNorm2d norm2_;
  torch::nn::Sequential shortcut_;
};

}  // namespace lockstep
