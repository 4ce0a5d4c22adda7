#include <ATen/ops/linear.h>
#include <lockstep/models/linear.hpp>

#include "cpu_linear.hpp"

namespace lockstep {

at::Tensor fast_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  return suits_cpu_linear(x, weight, bias) ? cpu_linear(x, weight, bias, /*relu=*/false)
                                           : at::linear(x, weight, bias.defined() ? std::optional(bias) : std::nullopt);
}

std::shared_ptr<torch::nn::Module> FastLinearImpl::clone(const std::optional<torch::Device>& device) const {
  const auto plain = std::dynamic_pointer_cast<torch::nn::LinearImpl>(torch::nn::LinearImpl::clone(device));
  const auto copy = std::make_shared<FastLinearImpl>(options);
  copy->weight.set_data(plain->weight);
  if (options.bias()) copy->bias.set_data(plain->bias);
  copy->train(is_training());
  return copy;
}

}  // namespace lockstep
