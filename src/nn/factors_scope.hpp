// FactorsScope: lets layers hand over the factors of a weight's gradient in backward, instead of the gradient.
//
// The product goes straight to a bucket, without a copy. And a backward by grains adds all grains' gradients of a
// weight. The factors of several grains give the sum in one pass over memory, instead of two or three per grain. If
// several operators read a parameter, the order of adding their gradients decides the bits. So a layer hands over a
// parameter only if one operator reads it. A scope belongs to its thread, and the innermost counts.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <unordered_map>
#include <vector>

namespace lockstep {

// Counts, for each leaf of the graph that begins at `root`, the operators that read it.
using GraphUses = std::unordered_map<const at::TensorImpl*, int>;
GraphUses uses_in_graph(const at::Tensor& root);

// Holds a weight's gradient [out, in] as the product of two matrices.
struct GradientFactors {
  at::Tensor grad;  // [out, rows]; of a view, keep a copy beyond backward, as autograd may own its memory
  at::Tensor x;     // [rows, in]
  // The layer's own kernel. It sets `sum` [out, in] to the sum of the products, in a balanced binary tree. Give it a
  // power of two of factors. The bits are those of computing each product first and adding the products then.
  void (*sum_products)(const std::vector<GradientFactors>& factors, const at::Tensor& sum);
};

class FactorsScope {
 public:
  // Returns whether it takes the factors of the parameter's gradient. If it does, the layer gives backward no gradient.
  using Take = std::function<bool(const at::Tensor& parameter, const GradientFactors& factors)>;
  FactorsScope(at::Tensor root, Take take);  // `root`: the tensor with which backward begins
  ~FactorsScope();
  FactorsScope& operator=(FactorsScope&&) = delete;

  // Offers factors to the innermost scope; call it from a layer within backward. Gives false if no scope takes them, or
  // if the caller of backward wants to see the gradient, by a hook or by torch::autograd::grad().
  static bool take(const at::Tensor& parameter, const GradientFactors& factors);

 private:
  const at::Tensor root_;
  const Take take_;
  FactorsScope* const before_;
  std::optional<GraphUses> uses_;  // counted when first asked for
};

}  // namespace lockstep
