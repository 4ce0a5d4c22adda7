#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/pooling.h>
#include <lockstep/base/error.hpp>
#include <lockstep/models/linear.hpp>
#include <lockstep/models/models.hpp>
#include <lockstep/nn/dropout.hpp>

#include "model_parts.hpp"

namespace lockstep {
namespace {

constexpr int64_t smallest_alexnet_image = 65;  // the last pooling makes one pixel of it

int64_t convolved(int64_t size, int64_t kernel, int64_t stride, int64_t padding) {
  return (size + 2 * padding - kernel) / stride + 1;
}

int64_t pooled(int64_t size) {
  return convolved(size, /*kernel=*/3, /*stride=*/2, /*padding=*/0);
}

// Only conv1 and the poolings change the size.
int64_t last_size(int64_t image_size) {
  return pooled(pooled(pooled(convolved(image_size, /*kernel=*/11, /*stride=*/4, /*padding=*/1))));
}

torch::nn::Conv2d same_size(int64_t in, int64_t out, int64_t kernel, int64_t groups = 1) {
  return torch::nn::Conv2d(torch::nn::Conv2dOptions(in, out, kernel).padding(kernel / 2).groups(groups));
}

torch::nn::MaxPool2d pooling() {
  return torch::nn::MaxPool2d(torch::nn::MaxPool2dOptions(3).stride(2));
}

}  // namespace

void check_options(const AlexNetOptions& options) {
  check_image_model("alexnet", options);
  check_image_size("alexnet", options.image_size, smallest_alexnet_image);
  if (options.groups != 1 && options.groups != 2) {
    throw Error("alexnet: groups is " + std::to_string(options.groups) +
                "; it must be 1, or 2 for the two towers of 2012");
  }
  check_dropout("alexnet", "dropout", options.dropout);
}

AlexNetImpl::AlexNetImpl(const AlexNetOptions& options) {
  check_options(options);
  const int64_t c96 = scaled(96, options.width), c256 = scaled(256, options.width), c384 = scaled(384, options.width),
                units = scaled(4096, options.width), size = last_size(options.image_size);
  const auto add_dropout = [&](const char* name) {
    if (options.dropout > 0) push_back(name, Dropout(options.dropout));
  };
  push_back("resize", resize(options.image_size));
  push_back("conv1", torch::nn::Conv2d(torch::nn::Conv2dOptions(options.in_channels, c96, 11).stride(4).padding(1)));
  push_back("relu1", torch::nn::ReLU());
  push_back("pool1", pooling());
  push_back("conv2", same_size(c96, c256, 5, options.groups));
  push_back("relu2", torch::nn::ReLU());
  push_back("pool2", pooling());
  push_back("conv3", same_size(c256, c384, 3));
  push_back("relu3", torch::nn::ReLU());
  push_back("conv4", same_size(c384, c384, 3, options.groups));
  push_back("relu4", torch::nn::ReLU());
  push_back("conv5", same_size(c384, c256, 3, options.groups));
  push_back("relu5", torch::nn::ReLU());
  push_back("pool5", pooling());
  push_back("flatten", torch::nn::Flatten());
  push_back("fc6", FastLinear(c256 * size * size, units));
  push_back("relu6", torch::nn::ReLU());
  add_dropout("dropout6");
  push_back("fc7", FastLinear(units, units));
  push_back("relu7", torch::nn::ReLU());
  add_dropout("dropout7");
  push_back("fc8", FastLinear(units, options.classes));
  draw_weights(*this, options.seed);
}

}  // namespace lockstep
