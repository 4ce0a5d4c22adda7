// ResidualBlock: computes ResNet-18's block, two convolutions beside a short cut (He et al. 2015, figure 2).
//
// It is a module for a torch::nn::Sequential, with BatchNorm. So in training mode a sample's result depends on the
// other samples of its part, and each device's running statistics follow the device's own parts. Use it from one thread
// at a time, like LibTorch's modules.
#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/pimpl.h>
#include <lockstep/nn/layer_holder.hpp>

#include <cstdint>
#include <iosfwd>
#include <string>

namespace lockstep {

class ResidualBlockImpl : public torch::nn::Cloneable<ResidualBlockImpl>, public LayerHolder {
 public:
  // Throws Error for a size below 1.
  ResidualBlockImpl(int64_t in_channels, int64_t out_channels, int64_t stride = 1);

  // Computes relu(norm2(conv2(relu(norm1(conv1(x))))) + shortcut(x)):
  // [n, in_channels, height, width] -> [n, out_channels, ceil(height / stride), ceil(width / stride)].
  torch::Tensor forward(const torch::Tensor& x);
  void reset() override;
  void pretty_print(std::ostream& out) const override;
  torch::nn::AnyModule& layer(const std::string& name) override { return name == "norm1" ? norm1 : norm2; }

  torch::nn::Conv2d conv1{nullptr}, conv2{nullptr};  // 3 x 3 without bias; conv1 has the stride
  torch::nn::AnyModule norm1, norm2;  // BatchNorm2d, or the layers that convert_sync_batchnorm has put in their places
  // The short cut: a 1 x 1 convolution with the stride, and a BatchNorm2d; empty if shapes stay and the block adds x.
  torch::nn::Sequential shortcut{nullptr};

 private:
  int64_t in_channels_, out_channels_, stride_;
};
TORCH_MODULE(ResidualBlock);

}  // namespace lockstep
