#include <ATen/ops/linear.h>
#include <lockstep/models/linear.hpp>

#include "cpu_linear.hpp"

namespace lockstep {

at::Tensor fast_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  return suits_cpu_linear(x, weight, bias) ? cpu_linear(x, weight, bias, /*relu=*/false)
                                           : at::linear(x, weight, bias.defined() ? std::optional(bias) : std::nullopt);
}

std::shared_ptr<torch::nn::Module> FastLinearImpl::clone(const std::optional<torch::Device>& device) const {
  return std::make_shared<FastLinearImpl>(dynamic_cast<const LinearImpl&>(*LinearImpl::clone(device)));
}

}  // namespace lockstep
