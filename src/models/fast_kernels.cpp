#include <ATen/ops/addmm.h>
#include <ATen/ops/conv2d.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/stack.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>
#include <lockstep/models/fast_kernels.hpp>
#include <lockstep/models/gpt.hpp>
#include <lockstep/models/linear.hpp>

#include "conv2d.hpp"
#include "own_kernels.hpp"

#include <cstdint>
#include <optional>

namespace lockstep {
namespace {

// LibTorch asks this key first, in threads that have turned it on. The key is for autocast on Graphcore's processors,
// and LibTorch has no kernels there. (The key of the CPU's autograd has a kernel for addmm, which nobody could call if
// another one took that place.)
constexpr auto fast = c10::DispatchKey::AutocastIPU;

void turn(bool on) {
  c10::impl::tls_set_dispatch_key_included(fast, on);
  c10::impl::tls_set_dispatch_key_excluded(fast, !on);  // autocast's keys are excluded by default
}

// An operator that is called within another one's kernel gets no gradient, nor does any in InferenceMode.
bool is_within_kernel() {
  return c10::impl::tls_is_dispatch_keyset_excluded(c10::autograd_dispatch_keyset);
}

// Gives a weight [out, in] whose transpose this is, or nothing if it has no such order in memory. A layer's weight is
// given itself, since fast_linear() hands over the gradients of parameters by grains.
at::Tensor weight_of(const at::Tensor& transposed) {
  if (transposed.layout() != at::kStrided || transposed.dim() != 2 || !transposed.t().is_contiguous()) return {};
  if (transposed.is_view()) {
    const at::Tensor base(transposed._base());
    if (base.dim() == 2 && base.is_contiguous() && base.sizes() == transposed.t().sizes() && base.is_leaf() &&
        base.const_data_ptr() == transposed.const_data_ptr() && base.requires_grad() == transposed.requires_grad()) {
      return base;
    }
  }
  return transposed.t();
}

// fast_linear() and fast_conv2d() leave to LibTorch's operators what their kernels are not made for. So each turns the
// key off, or these operators would come here again.
at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  const FastKernels off(/*enabled=*/false);
  return is_within_kernel() ? at::linear(x, weight, bias) : fast_linear(x, weight, bias.value_or(at::Tensor()));
}

// torch::nn::functional::linear() calls this one for x [n, in] with a bias, and else matmul.
at::Tensor addmm(const at::Tensor& bias, const at::Tensor& x, const at::Tensor& transposed, const at::Scalar& beta,
                 const at::Scalar& alpha) {
  const FastKernels off(/*enabled=*/false);
  const bool suits = !is_within_kernel() && bias.dim() == 1 && beta.equal(1) && alpha.equal(1);
  const at::Tensor weight = suits ? weight_of(transposed) : at::Tensor();
  return weight.defined() ? fast_linear(x, weight, bias) : at::addmm(bias, x, transposed, beta, alpha);
}

at::Tensor matmul(const at::Tensor& x, const at::Tensor& transposed) {
  const FastKernels off(/*enabled=*/false);
  const at::Tensor weight = x.dim() >= 2 && !is_within_kernel() ? weight_of(transposed) : at::Tensor();
  return weight.defined() ? fast_linear(x, weight) : at::matmul(x, transposed);
}

at::Tensor conv2d(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                  at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation, int64_t groups) {
  const FastKernels off(/*enabled=*/false);
  if (is_within_kernel()) return at::conv2d(x, weight, bias, stride, padding, dilation, groups);
  return fast_conv2d(x, weight, bias.value_or(at::Tensor()), stride, padding, dilation, groups);
}

// For each length of texts oneDNN compiles kernels, which LibTorch keeps. So lengths must be multiples of this number.
constexpr int64_t kStepOfLengths = 64;

at::Tensor attention(const at::Tensor& queries, const at::Tensor& keys, const at::Tensor& values,
                     const std::optional<at::Tensor>& mask, double dropout, bool is_causal, std::optional<double> scale,
                     bool enable_gqa) {
  const FastKernels off(/*enabled=*/false);
  const bool suits = !is_within_kernel() && is_causal && !mask && dropout == 0 && !scale && is_plain_float(queries) &&
                     is_plain_float(keys) && is_plain_float(values) && queries.dim() == 4 && queries.numel() > 0 &&
                     queries.sizes() == keys.sizes() && keys.sizes() == values.sizes() &&
                     queries.size(2) % kStepOfLengths == 0 && takes_micro_kernel();
  if (!suits) {
    return at::scaled_dot_product_attention(queries, keys, values, mask, dropout, is_causal, scale, enable_gqa);
  }
  const at::Tensor qkv =
      at::stack({queries.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2)}, /*dim=*/2).flatten(2);
  return causal_attention(qkv, queries.size(1)).unflatten(-1, {queries.size(1), -1}).transpose(1, 2);
}

}  // namespace

FastKernels::FastKernels(bool enabled) : before_(c10::impl::tls_is_dispatch_key_included(fast)) {
  turn(enabled);
}

FastKernels::~FastKernels() {
  turn(before_);
}

TORCH_LIBRARY_IMPL(_, AutocastIPU, library) {
  library.fallback(torch::CppFunction::makeFallthrough());  // other operators cost nothing
}

TORCH_LIBRARY_IMPL(aten, AutocastIPU, library) {
  library.impl("linear", linear);
  library.impl("addmm", addmm);
  library.impl("matmul", matmul);
  library.impl("conv2d", conv2d);
  library.impl("scaled_dot_product_attention", attention);
}

}  // namespace lockstep
