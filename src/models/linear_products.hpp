// Computes the products of a linear layer with few samples, by oneDNN's micro-kernel, as LibTorch's attention does.
//
// oneDNN's own products copy the weight for each call, into the order that their kernel reads. The copy for few samples
// costs as much as a quarter of the product (docs/decisions/0038). These products read the weight where it lies. Give
// float32 tensors that are dense and in the CPU's memory. Thread-safe. Cost: a kernel is compiled for each new shape,
// once per thread.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "nn/factors_scope.hpp"

namespace lockstep {

inline at::Tensor rows_of(const at::Tensor& x) {  // [..., n] -> [rows, n]
  return x.dim() == 2 ? x : x.reshape({-1, x.size(-1)});
}

// Tells whether these products are the fastest here: on one intra-op thread, if LibTorch has the micro-kernel.
bool has_small_products();

// Tells whether these products suit so many rows of x, with a weight [out, in].
bool is_small_forward(int64_t rows);
bool is_small_for_x(int64_t rows, const at::Tensor& weight);
bool is_small_for_weight(int64_t rows, const at::Tensor& weight);

// Computes x [rows, in] * weight^T + bias -> [rows, out].
at::Tensor small_forward(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias);

// Computes grad [rows, out] * weight -> [rows, in].
at::Tensor small_product_for_x(const at::Tensor& grad, const at::Tensor& weight);

// Gives the factors of a weight's gradient, with sum_products(). Copies grad [rows, out], and not x [rows, in].
GradientFactors gradient_factors(const at::Tensor& grad, const at::Tensor& x);

// Sums the factors' products for GradientFactors, in one pass over the memory of `sum`.
void sum_products(const std::vector<GradientFactors>& factors, const at::Tensor& sum);

}  // namespace lockstep
