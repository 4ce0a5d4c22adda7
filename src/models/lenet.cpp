#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/GradMode.h>
#include <torch/nn/modules/activation.h>
#include <lockstep/base/error.hpp>
#include <lockstep/models/models.hpp>

#include <string>

#include "base/classic.hpp"

namespace lockstep {

std::vector<torch::Tensor> lenet_params(uint64_t seed) {
  const double scale = 0.01;
  const at::Generator generator = at::detail::createCPUGenerator(seed);
  const auto weights = [&](at::IntArrayRef sizes) { return torch::randn(sizes, generator, torch::kFloat) * scale; };
  const auto biases = [](int64_t size) { return torch::zeros({size}, torch::kFloat); };

  return {weights({20, 1, 3, 3}), biases(20),  weights({50, 20, 5, 5}), biases(50),
          weights({800, 128}),    biases(128), weights({128, 10}),      biases(10)};  // drawn in this order
}

namespace {

void check_params(const char* function, const std::vector<torch::Tensor>& params) {
  static const std::vector<std::vector<int64_t>> shapes = {{20, 1, 3, 3}, {20},  {50, 20, 5, 5}, {50},
                                                           {800, 128},    {128}, {128, 10},      {10}};
  if (params.size() != shapes.size()) {
    throw Error(std::string(function) + ": LeNet has " + std::to_string(shapes.size()) +
                " parameters (W1, b1, … W4, b4), this list has " + std::to_string(params.size()));
  }
  for (size_t i = 0; i < shapes.size(); ++i) {
    if (!params[i].defined() || params[i].sizes() != at::IntArrayRef(shapes[i])) {
      throw Error(std::string(function) + ": LeNet's parameter " + std::to_string(i) + " must be " +
                  classic_text(at::IntArrayRef(shapes[i])) + ", this one is " +
                  (params[i].defined() ? classic_text(params[i].sizes()) : std::string("undefined")));
    }
  }
}

void check_images(const torch::Tensor& x) {
  if (!x.defined() || x.dim() != 4 || x.size(1) != 1 || x.size(2) != 28 || x.size(3) != 28) {
    throw Error("lenet: images must be [n, 1, 28, 28], these are " +
                (x.defined() ? classic_text(x.sizes()) : std::string("undefined")));
  }
}

// Transposes the matrices: torch::nn::Linear keeps [out, in], the section's are [in, out].
void copy_params(LeNetImpl& net, const std::vector<torch::Tensor>& params) {
  const torch::NoGradGuard no_grad;
  auto to = net.parameters();  // the layers' in their order, of each the weight and then the bias
  for (size_t i = 0; i < to.size(); ++i) to[i].copy_(params[i].dim() == 2 ? params[i].t() : params[i]);
}

}  // namespace

torch::Tensor lenet(const torch::Tensor& x, const std::vector<torch::Tensor>& params) {
  check_params("lenet", params);
  check_images(x);
  const auto h1_conv = torch::conv2d(x, params[0], params[1]);
  const auto h1 = torch::avg_pool2d(torch::relu(h1_conv), /*kernel_size=*/2, /*stride=*/2);
  const auto h2_conv = torch::conv2d(h1, params[2], params[3]);
  const auto h2 = torch::avg_pool2d(torch::relu(h2_conv), /*kernel_size=*/2, /*stride=*/2);
  const auto h3_linear = torch::mm(h2.flatten(1), params[4]) + params[5];
  const auto h3 = torch::relu(h3_linear);
  return torch::mm(h3, params[6]) + params[7];
}

LeNetImpl::LeNetImpl(uint64_t seed) : conv1(1, 20, 3), conv2(20, 50, 5), fc1(800, 128), fc2(128, 10) {
  push_back("conv1", conv1);
  push_back("conv2", conv2);
  push_back("flatten", torch::nn::Flatten());
  push_back("fc1", fc1);
  push_back("relu", torch::nn::ReLU());
  push_back("fc2", fc2);
  copy_params(*this, lenet_params(seed));
}

torch::Tensor LeNetImpl::forward(const torch::Tensor& x) {
  check_images(x);
  return SequentialImpl::forward(x);
}

void load_lenet_params(LeNet& net, const std::vector<torch::Tensor>& params) {
  check_params("load_lenet_params", params);
  copy_params(*net, params);
}

}  // namespace lockstep
