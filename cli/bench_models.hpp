// The models that lockstep bench measures with: an MLP of 25 million parameters, and ResNet-18 for small images.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>

#include <cstdint>
#include <vector>

namespace lockstep::cli {

// Six layers of 2048 x 2048 and ten classes: 25.2 million parameters, little to compute for each.
struct Mlp : torch::nn::Module {
  Mlp();
  torch::Tensor forward(torch::Tensor x);  // [n, 2048] -> [n, 10]
  static constexpr int64_t kWidth = 2048;

  std::vector<torch::nn::Linear> layers;
};

// Two convolutions beside a short cut (He et al. 2015, figure 2).
struct ResidualBlock : torch::nn::Module {
  ResidualBlock(int64_t in, int64_t out, int64_t stride);
  torch::Tensor forward(const torch::Tensor& x);

  torch::nn::Conv2d conv1, conv2;
  torch::nn::BatchNorm2d norm1, norm2;
  torch::nn::Sequential shortcut;
};

// ResNet-18 as it is built for images of 32 x 32: a 3 x 3 convolution first, and no pooling after it. 11.2 million
// parameters, much to compute for each.
struct ResNet18 : torch::nn::Module {
  ResNet18();
  torch::Tensor forward(torch::Tensor x);  // [n, 3, 32, 32] -> [n, 10]

  torch::nn::Conv2d conv;
  torch::nn::BatchNorm2d norm;
  std::vector<std::shared_ptr<ResidualBlock>> blocks;
  torch::nn::Linear output;
};

}  // namespace lockstep::cli
