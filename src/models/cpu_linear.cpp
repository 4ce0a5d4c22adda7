#include "cpu_linear.hpp"

#include <ATen/ops/_unsafe_view.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/threshold_backward.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/custom_function.h>

#include "linear_products.hpp"
#include "own_kernels.hpp"

#include <algorithm>
#include <optional>

namespace lockstep {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Below these, calls cost more than the kernels save.
constexpr int64_t kFewestRows = 16, kFewestProducts = 1 << 15;

// Rows may be so many times the most features: 4,096, or 1,048,576.
constexpr int64_t kRowsPerFeature = 4;

// Returns undefined if a FactorsScope has taken the factors.
at::Tensor gradient_of_weight(const at::Tensor& transposed_grad, const at::Tensor& x, const at::Tensor& weight) {
  const GradientFactors factors = gradient_factors(transposed_grad, x);
  if (FactorsScope::take(weight, factors)) return {};
  const at::Tensor gradient = at::empty(weight.sizes(), weight.options());
  sum_products({factors}, gradient);
  return gradient;
}

class CpuLinear : public torch::autograd::Function<CpuLinear> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& weight,
                            const std::optional<at::Tensor>& bias, bool relu) {
    RECORD_USER_SCOPE_WITH_INPUTS("lockstep::linear", read_by_kernels({weight, bias}));
    auto sizes = x.sizes().vec();
    sizes.back() = weight.size(0);
    // Nobody may change a view of a Function in place, as torch::nn::functional::linear() would.
    const at::Tensor y = at::_unsafe_view(linear_product(rows_of(x), weight, bias, relu), sizes);
    ctx->saved_data["has_bias"] = bias.has_value();
    ctx->save_for_backward(relu ? variable_list{x, weight, y} : variable_list{x, weight});
    return y;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const at::Tensor &x = saved[0], &weight = saved[1];
    const std::optional<at::Tensor> y = saved.size() > 2 ? std::optional(rows_of(saved[2])) : std::nullopt;
    const bool needs_bias = ctx->saved_data["has_bias"].toBool() && ctx->needs_input_grad(2);
    variable_list gradients(4);
    if (!grads[0].defined()) return gradients;
    const at::Tensor grad = rows_of(grads[0].resolve_neg());
    if (at::GradMode::is_enabled()) {  // a second derivative is wanted
      const at::Tensor passed = y ? at::threshold_backward(grad, *y, 0) : grad;
      gradients[0] = at::mm(passed, weight).view(x.sizes());
      gradients[1] = at::mm(passed.t(), rows_of(x));
      if (needs_bias) gradients[2] = passed.sum(0);
      return gradients;
    }
    RECORD_USER_SCOPE_WITH_INPUTS("lockstep::linear_backward", read_by_kernels({weight}));
    const OutputGradient output = output_gradient(grad, y);
    if (ctx->needs_input_grad(0)) gradients[0] = product_for_x(output.grad, weight).view(x.sizes());
    if (ctx->needs_input_grad(1)) gradients[1] = gradient_of_weight(output.transposed, rows_of(x), weight);
    if (needs_bias) gradients[2] = output.sums;
    return gradients;
  }
};

}  // namespace

bool suits_cpu_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  return is_plain_float(x) && is_plain_float(weight) && x.dim() >= 2 && weight.dim() == 2 && x.numel() > 0 &&
         x.size(-1) == weight.size(1) && x.numel() >= kFewestRows * x.size(-1) &&
         x.numel() * weight.size(0) >= kFewestProducts && weight.is_contiguous() &&
         (!bias.defined() ||
          (is_plain_float(bias) && bias.is_contiguous() && bias.sizes() == at::IntArrayRef({weight.size(0)}))) &&
         takes_micro_kernel() && x.numel() <= kRowsPerFeature * most_micro_kernel_features() * x.size(-1) &&
         std::max(weight.size(0), weight.size(1)) <= most_micro_kernel_features();
}

at::Tensor cpu_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, bool relu) {
  return CpuLinear::apply(x, weight, bias.defined() ? std::optional(bias) : std::nullopt, relu);
}

}  // namespace lockstep
