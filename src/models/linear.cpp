#include <ATen/Context.h>
#include <ATen/Version.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mm.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/custom_function.h>
#include <lockstep/models/linear.hpp>

#include "linear_products.hpp"
#include "own_kernels.hpp"

#include <optional>
#include <string_view>
#include <vector>

namespace lockstep {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// This is the operator that PyTorch's compiler calls for a linear layer on CPUs. LibTorch gives it no gradient.
using Pointwise = at::Tensor(const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, std::string_view,
                             c10::List<std::optional<at::Scalar>>, std::optional<std::string_view>);

bool is_amd() {
#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
  return __builtin_cpu_is("amd") != 0;
#else
  return false;
#endif
}

// Gives oneDNN's operator, or none if LibTorch's own is as fast here, or if this LibTorch lacks oneDNN's.
const std::optional<c10::TypedOperatorHandle<Pointwise>>& onednn() {
  static const auto found = []() -> std::optional<c10::TypedOperatorHandle<Pointwise>> {
    if (!is_amd() || at::get_cpu_capability() != "AVX512") return std::nullopt;
    const auto handle = c10::Dispatcher::singleton().findOp({"mkldnn::_linear_pointwise", ""});
    if (!handle || !handle->hasKernelForDispatchKey(c10::DispatchKey::CPU)) return std::nullopt;
    try {
      return handle->typed<Pointwise>();
    } catch (const c10::Error&) {  // this LibTorch's operator has other arguments
      return std::nullopt;
    }
  }();
  return found;
}

at::Tensor onednn_product(const at::Tensor& x, const at::Tensor& weight,
                          const std::optional<at::Tensor>& bias = std::nullopt) {
  return onednn()->call(x, weight, bias, "none", c10::List<std::optional<at::Scalar>>(), "");
}

bool is_small(const at::Tensor& weight) {
  return weight.is_contiguous() && has_small_products();
}

int64_t number_of_rows(const at::Tensor& x) {
  return x.numel() / x.size(-1);
}

// Makes y [..., out] of x [..., in] by a product that takes and gives rows.
at::Tensor with_rows(const at::Tensor& x, const auto& product) {
  if (x.dim() == 2) return product(x);
  auto sizes = x.sizes().vec();
  const at::Tensor y = product(rows_of(x));
  sizes.back() = y.size(1);
  return y.view(sizes);
}

at::Tensor forward_product(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  if (!is_small_forward(number_of_rows(x)) || !is_small(weight)) return onednn_product(x, weight, bias);
  RECORD_USER_SCOPE_WITH_INPUTS("lockstep::linear", read_by_kernels({weight, bias}));
  return with_rows(x, [&](const at::Tensor& rows) { return small_forward(rows, weight, bias); });
}

at::Tensor product_for_x(const at::Tensor& grad, const at::Tensor& weight) {
  if (!is_small_for_x(number_of_rows(grad), weight) || !is_small(weight)) return onednn_product(grad, weight.t());
  RECORD_USER_SCOPE_WITH_INPUTS("lockstep::linear_backward", read_by_kernels({weight}));
  return with_rows(grad, [&](const at::Tensor& rows) { return small_product_for_x(rows, weight); });
}

// Returns undefined if a FactorsScope has taken the factors.
at::Tensor product_for_weight(const at::Tensor& grad, const at::Tensor& x, const at::Tensor& weight) {
  if (!is_small_for_weight(x.size(0), weight) || !is_small(weight)) {
    return onednn_product(grad.t(), x.contiguous().t());
  }
  const GradientFactors factors = gradient_factors(grad, x);
  if (FactorsScope::take(weight, factors)) return {};
  const at::Tensor gradient = at::empty(weight.sizes(), weight.options());
  sum_products({factors}, gradient);
  return gradient;
}

class OneDnnLinear : public torch::autograd::Function<OneDnnLinear> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& weight,
                            const std::optional<at::Tensor>& bias) {
    ctx->saved_data["has_bias"] = bias.has_value();
    ctx->save_for_backward({x, weight});
    return forward_product(x, weight, bias);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const at::Tensor &x = saved[0], &weight = saved[1];
    variable_list gradients(3);
    if (!grads[0].defined()) return gradients;
    const at::Tensor grad = grads[0].resolve_neg();
    if (at::GradMode::is_enabled()) {  // a second derivative is wanted
      gradients[0] = at::matmul(grad, weight);
      gradients[1] = at::mm(rows_of(grad).t(), rows_of(x));
    } else {
      if (ctx->needs_input_grad(0)) gradients[0] = product_for_x(grad, weight);
      if (ctx->needs_input_grad(1)) gradients[1] = product_for_weight(rows_of(grad), rows_of(x), weight);
    }
    if (ctx->saved_data["has_bias"].toBool() && ctx->needs_input_grad(2)) gradients[2] = rows_of(grad).sum(0);
    return gradients;
  }
};

bool suits_onednn(const at::Tensor& tensor) {
  return tensor.defined() && is_plain_float(tensor) && tensor.numel() > 0;
}

// Tells whether oneDNN can take these tensors. LibTorch takes others, as its errors say more. The operator makes x
// dense. For a weight that is not dense oneDNN takes a slow loop. oneDNN reads any bias as if it were dense.
bool fit(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  return x.dim() >= 2 && weight.dim() == 2 && x.size(-1) == weight.size(1) &&
         (weight.is_contiguous() || weight.t().is_contiguous()) &&
         (!bias.defined() || (bias.sizes() == at::IntArrayRef({weight.size(0)}) && bias.is_contiguous()));
}

}  // namespace

at::Tensor fast_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  const bool is_onednns = onednn() && suits_onednn(x) && suits_onednn(weight) &&
                          (!bias.defined() || suits_onednn(bias)) && fit(x, weight, bias) &&
                          !at::autocast::is_autocast_enabled(at::kCPU) && at::globalContext().userEnabledMkldnn();
  return is_onednns ? OneDnnLinear::apply(x, weight, bias.defined() ? std::optional(bias) : std::nullopt)
                    : at::linear(x, weight, bias);
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
