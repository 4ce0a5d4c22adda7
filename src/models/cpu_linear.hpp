// cpu_linear: computes x * weight^T + bias on the CPU by linear_products.hpp, with a ReLU and with gradients.
// fast_linear() and linear_relu() take it for tensors that suit.
#pragma once

#include <ATen/core/Tensor.h>

namespace lockstep {

// Tells whether cpu_linear() can take these tensors and is worth it. Give all others to LibTorch, whose errors say
// more.
bool suits_cpu_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias);

// Maps x [..., in] to [..., out]; the bias may be undefined. Can be differentiated, also twice. A backward by grains
// adds the weight's gradient straight to the grains' sum.
at::Tensor cpu_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, bool relu);

}  // namespace lockstep
