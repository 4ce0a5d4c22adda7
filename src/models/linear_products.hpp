// Computes the products of a linear layer with few samples, by oneDNN's micro-kernel, as LibTorch's attention does.
//
// oneDNN's own products copy the weight for each call, into the order that their kernel reads. With few samples that
// costs as much as a quarter of the product (docs/decisions/0038). These products read the weight where it lies.
// Everything must be float32, dense and in the CPU's memory. Thread-safe. Cost: a kernel is compiled for each new
// shape, once per thread.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace lockstep {

// Whether these products are the fastest here: on one intra-op thread, if LibTorch has the micro-kernel.
bool has_small_products();

// Whether they suit so many rows of x, with a weight [out, in].
bool is_small_forward(int64_t rows);
bool is_small_for_x(int64_t rows, const at::Tensor& weight);
bool is_small_for_weight(int64_t rows, const at::Tensor& weight);

// x [rows, in] * weight^T + bias -> [rows, out]
at::Tensor small_forward(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias);

// grad [rows, out] * weight -> [rows, in]
at::Tensor small_product_for_x(const at::Tensor& grad, const at::Tensor& weight);

// The product of both is a weight's gradient [out, in].
struct GradientFactors {
  at::Tensor grad;  // [out, rows]
  at::Tensor x;     // [rows, in]
};
GradientFactors gradient_factors(const at::Tensor& grad, const at::Tensor& x);  // copies grad [rows, out], not x

// Sets `sum` [out, in] to the sum of the products, in a balanced binary tree. Give a power of two of them. The bits are
// those of computing each product and adding them then. It takes one pass over the memory of `sum`.
void sum_products(const std::vector<GradientFactors>& factors, const at::Tensor& sum);

}  // namespace lockstep
