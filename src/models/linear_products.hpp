// Computes the products of a linear layer by AMX (kernels/amx.hpp) where the CPU has it and x has 64 rows at least, or
// else by oneDNN's micro-kernel (devices/micro_kernel.hpp), tile by tile, on the calling thread's intra-op threads.
//
// Bias and ReLU are applied to a tile while the tile is in the caches. Bits depend on shapes and the kind of processor,
// and not on the number of threads. Give float32 tensors that are dense and in the CPU's memory. Thread-safe.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "nn/factors_scope.hpp"

namespace lockstep {

inline at::Tensor rows_of(const at::Tensor& x) {  // [..., n] -> [rows, n]
  return x.dim() == 2 ? x : x.reshape({-1, x.size(-1)});
}

// Computes x [rows, in] * weight^T + bias -> [rows, out], or relu() of it.
at::Tensor linear_product(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                          bool relu);

// Computes grad [rows, out] * weight -> [rows, in].
at::Tensor product_for_x(const at::Tensor& grad, const at::Tensor& weight);

// Holds what backward takes from the gradient of a layer's result.
struct OutputGradient {
  at::Tensor grad;        // [rows, out], dense, behind the ReLU if there is one
  at::Tensor transposed;  // [out, rows]; dense, or a view of `grad` where AMX multiplies
  at::Tensor sums;        // [out], which is the bias's gradient
};

// Passes over grad [rows, out] once. Give the layer's result y if it has a ReLU.
OutputGradient output_gradient(const at::Tensor& grad, const std::optional<at::Tensor>& y);

// Gives the factors of a weight's gradient, with sum_products(). x: [rows, in].
GradientFactors gradient_factors(const at::Tensor& transposed_grad, const at::Tensor& x);

// Sums the factors' products for GradientFactors, in one pass over the memory of `sum`. Factors may differ in rows.
void sum_products(const std::vector<GradientFactors>& factors, const at::Tensor& sum);

}  // namespace lockstep
