#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/pooling.h>
#include <lockstep/models/models.hpp>
#include <lockstep/models/residual_block.hpp>

#include "model_parts.hpp"

#include <string>

namespace lockstep {
namespace {

// Three of the blocks halve the size, which leaves 2 of 9 pixels. So even a batch of one sample has more than one value
// per channel, as normalisation needs.
constexpr int64_t smallest_resnet_image = 9;

}  // namespace

void check_options(const ResNet18Options& options) {
  check_image_model("resnet18", options);
  if (options.image_size != 0) check_image_size("resnet18", options.image_size, smallest_resnet_image);
}

ResNet18Impl::ResNet18Impl(const ResNet18Options& options) {
  check_options(options);
  int64_t in = scaled(64, options.width);
  if (options.image_size != 0) push_back("resize", resize(options.image_size));
  push_back("conv1", torch::nn::Conv2d(
                         torch::nn::Conv2dOptions(options.in_channels, in, 3).padding(1).bias(/*new_bias=*/false)));
  push_back("norm1", torch::nn::BatchNorm2d(in));
  push_back("relu", torch::nn::ReLU());
  int number = 0;
  for (const int64_t channels : {64, 128, 256, 512}) {
    const int64_t out = scaled(channels, options.width);
    for (const int64_t stride : {channels == 64 ? 1 : 2, 1}) {
      push_back("block" + std::to_string(++number), ResidualBlock(in, out, stride));
      in = out;
    }
  }
  push_back("pool", torch::nn::AdaptiveAvgPool2d(1));
  push_back("flatten", torch::nn::Flatten());
  push_back("fc", torch::nn::Linear(in, options.classes));
  draw_weights(*this, options.seed);
}

}  // namespace lockstep
