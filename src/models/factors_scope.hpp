// FactorsScope: in backward, lets linear layers hand over the factors of a weight's gradient in the place of it.
//
// By grains, all grains' gradients of a weight are added up. With the factors of several grains their sum takes one
// pass over memory, in place of two or three for each grain. Where several operators' gradients of a parameter are
// summed up, the order decides over the bits; so only a parameter that one operator reads is handed over. A scope
// belongs to its thread, and the innermost counts.
#pragma once

#include <ATen/core/Tensor.h>

#include "linear_products.hpp"

#include <functional>
#include <optional>
#include <unordered_map>

namespace lockstep {

class FactorsScope {
 public:
  // Whether it takes the factors of the parameter's gradient. Then the layer has no gradient of it for backward.
  using Take = std::function<bool(const at::Tensor& parameter, const GradientFactors& factors)>;
  FactorsScope(at::Tensor root, Take take);  // `root`: what backward begins with
  ~FactorsScope();
  FactorsScope(const FactorsScope&) = delete;
  FactorsScope& operator=(const FactorsScope&) = delete;

  // For a layer within backward. False: there is no scope that takes them; or whoever calls backward wants to see the
  // gradient, by a hook or by torch::autograd::grad().
  static bool take(const at::Tensor& parameter, const GradientFactors& factors);

  // The leaves of a graph, and how many of its operators read each.
  using Uses = std::unordered_map<const at::TensorImpl*, int>;
  static Uses uses_in_graph(const at::Tensor& root);

 private:
  const at::Tensor root_;
  const Take take_;
  FactorsScope* const before_;
  std::optional<Uses> uses_;  // how many operators of the graph read each parameter; counted when first asked for
};

}  // namespace lockstep
