#include "bench_models.hpp"

#include <torch/nn/functional/pooling.h>

#include <memory>
#include <string>

namespace lockstep::cli {

namespace {

torch::nn::Conv2d convolution(int64_t in, int64_t out, int64_t kernel, int64_t stride) {
  return torch::nn::Conv2d(
      torch::nn::Conv2dOptions(in, out, kernel).stride(stride).padding(kernel / 2).bias(/*new_bias=*/false));
}

}  // namespace

Mlp::Mlp() {
  for (int i = 0; i < 6; ++i) {
    layers.push_back(register_module("layer" + std::to_string(i), torch::nn::Linear(kWidth, kWidth)));
  }
  layers.push_back(register_module("output", torch::nn::Linear(kWidth, 10)));
}

torch::Tensor Mlp::forward(torch::Tensor x) {
  for (size_t i = 0; i + 1 < layers.size(); ++i) x = torch::relu(layers[i](x));
  return layers.back()(x);
}

ResidualBlock::ResidualBlock(int64_t in, int64_t out, int64_t stride)
    : conv1(register_module("conv1", convolution(in, out, 3, stride))),
      conv2(register_module("conv2", convolution(out, out, 3, 1))),
      norm1(register_module("norm1", torch::nn::BatchNorm2d(out))),
      norm2(register_module("norm2", torch::nn::BatchNorm2d(out))),
      shortcut(register_module("shortcut", torch::nn::Sequential())) {
  if (stride == 1 && in == out) return;
  shortcut->push_back(convolution(in, out, 1, stride));
  shortcut->push_back(torch::nn::BatchNorm2d(out));
}

torch::Tensor ResidualBlock::forward(const torch::Tensor& x) {
  torch::Tensor y = torch::relu(norm1(conv1(x)));
  y = norm2(conv2(y));
  return torch::relu(y + (shortcut->is_empty() ? x : shortcut->forward(x)));
}

ResNet18::ResNet18()
    : conv(register_module("conv", convolution(3, 64, 3, 1))),
      norm(register_module("norm", torch::nn::BatchNorm2d(64))),
      output(register_module("output", torch::nn::Linear(512, 10))) {
  int64_t in = 64;
  for (const int64_t out : {64, 128, 256, 512}) {
    for (int i = 0; i < 2; ++i) {
      const auto block = std::make_shared<ResidualBlock>(in, out, /*stride=*/in == out ? 1 : 2);
      blocks.push_back(register_module("block" + std::to_string(blocks.size()), block));
      in = out;
    }
  }
}

torch::Tensor ResNet18::forward(torch::Tensor x) {
  x = torch::relu(norm(conv(x)));
  for (const auto& block : blocks) x = block->forward(x);
  return output(
      torch::nn::functional::adaptive_avg_pool2d(x, torch::nn::functional::AdaptiveAvgPool2dFuncOptions(1)).flatten(1));
}

}  // namespace lockstep::cli
