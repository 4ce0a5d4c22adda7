#include "conv2d.hpp"

#include <ATen/autocast_mode.h>
#include <ATen/ops/conv2d.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/empty.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>

#include "intra_op.hpp"
#include "models/kernels/kernels.hpp"
#include "own_kernels.hpp"

#include <algorithm>
#include <optional>
#include <variant>

namespace lockstep {
namespace {

using at::MemoryFormat;
using at::Tensor;
using kernels::kTilesAtOnce;
using kernels::WinogradKernels;
using kernels::WinogradShape;
using kernels::WinogradWeight;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

bool suits_winograd(const Tensor& tensor) {
  return is_plain_float(tensor) && tensor.dim() == 4 && tensor.numel() > 0;
}

WinogradShape shape_of(const Tensor& x, int64_t out_channels) {
  const int64_t images = x.size(0), height = x.size(2), width = x.size(3);
  const int64_t tiles = images * at::divup(height, kernels::kTileSide) * at::divup(width, kernels::kTileSide);
  return {images, height, width, x.size(1), out_channels, tiles};
}

// A tile costs as much as 4 pixels without tiles. The other terms, fitted to measurements, are the weight's.
bool has_enough_pixels(const WinogradShape& shape) {
  const int64_t pixels = shape.images * shape.height * shape.width;
  return 4 * shape.tiles + 32 + (shape.channels + shape.out_channels) / 4 <= pixels;
}

bool suits_winograd(const Tensor& x, const Tensor& weight, const Tensor& bias) {
  const WinogradKernels* const kernels = kernels::of_this_cpu().winograd;
  return kernels != nullptr && suits_winograd(x) && suits_winograd(weight) && weight.size(2) == 3 &&
         weight.size(3) == 3 && x.is_contiguous(MemoryFormat::ChannelsLast) && x.size(1) == weight.size(1) &&
         weight.size(0) % kernels->panel_channels == 0 && weight.size(1) % kernels->panel_channels == 0 &&
         (!bias.defined() || (is_plain_float(bias) && bias.sizes() == at::IntArrayRef({weight.size(0)}))) &&
         has_enough_pixels(shape_of(x, weight.size(0))) &&
         !at::autocast::is_autocast_enabled(at::kCPU);  // mixed precision would compute it in bfloat16
}

Tensor channels_last(at::IntArrayRef sizes) {
  return at::empty(sizes, at::TensorOptions(at::kFloat).memory_format(MemoryFormat::ChannelsLast));
}

// Convolves x. If for_gradient is set, x is the gradient of a convolution's result, and the result that of its input.
Tensor convolve(const Tensor& x, const Tensor& weight, bool for_gradient) {
  const WinogradKernels& kernels = *kernels::of_this_cpu().winograd;
  const WinogradShape shape = shape_of(x, weight.size(for_gradient ? 1 : 0));
  const int64_t size = kernels.panel_channels, panels = shape.out_channels / size, threads = at::get_num_threads();
  const RowRanges calls{.rows = shape.tiles, .size = 1, .most = kTilesAtOnce};
  const Tensor taps = weight.contiguous(MemoryFormat::ChannelsLast);
  WinogradWeight operand{taps.const_data_ptr<float>(), for_gradient, nullptr};
  Tensor all_panels;
  // A thread with one call makes panels one by one, since all panels may leave the cache.
  if (calls.count() > threads) {
    const int64_t values = kernels::kTileValues * shape.channels * size;
    all_panels = at::empty({panels, values}, at::kFloat);
    auto* const to = all_panels.mutable_data_ptr<float>();
    for_each_in_parallel(panels,
                         [&](int64_t i) { kernels.transform_weight(shape, operand, i * size, to + i * values); });
    operand.panels = to;
  }

  Tensor y = channels_last({shape.images, shape.out_channels, shape.height, shape.width});
  const auto* const from = x.const_data_ptr<float>();
  auto* const to = y.mutable_data_ptr<float>();
  const int64_t shares = std::clamp<int64_t>(threads / calls.count(), 1, panels);  // threads share a call's panels
  for_each_with_scratch(calls.count() * shares, kernels.convolve_scratch(shape), [&](int64_t i, float* scratch) {
    const int64_t call = i / shares, begin = panels * (i % shares) / shares, end = panels * (i % shares + 1) / shares;
    kernels.convolve(shape, from, operand, calls.first_value(call), calls.rows_in(call), begin * size, end * size,
                     scratch, to);
  });
  return y;
}

// Adds up each part of the tiles by itself. A part has 256 tiles at least; there are 16 parts at most.
Tensor gradient_of_weight(const Tensor& x, const Tensor& grad) {
  const WinogradKernels& kernels = *kernels::of_this_cpu().winograd;
  const WinogradShape shape = shape_of(x, grad.size(1));
  const int64_t in_part = kTilesAtOnce * at::divup(std::max<int64_t>(256, at::divup(shape.tiles, 16)), kTilesAtOnce);
  const RowRanges parts{.rows = shape.tiles, .size = 1, .most = in_part};
  const int64_t count = parts.count(), blocks = kernels.gradient_blocks(shape), size = kernels.block_products(shape);
  const Tensor products = at::empty({count > 1 ? blocks * count * size : 0}, at::kFloat);
  Tensor grad_weight = channels_last({shape.out_channels, shape.channels, 3, 3});
  const auto *const from = x.const_data_ptr<float>(), *const grad_y = grad.const_data_ptr<float>();
  auto* const all = products.mutable_data_ptr<float>();
  auto* const to = grad_weight.mutable_data_ptr<float>();
  const int64_t floats = kernels.gradient_scratch + (count > 1 ? 0 : size);
  for_each_with_scratch(blocks * count, floats, [&](int64_t i, float* scratch) {
    const int64_t block = i / count, part = i % count;
    auto* const own = count > 1 ? all + i * size : scratch + kernels.gradient_scratch;
    kernels.add_products(shape, from, grad_y, block, parts.first_value(part), parts.rows_in(part), scratch, own);
    if (count == 1) kernels.gradient_of_weight(shape, own, 1, block, to);  // while the cache has the products
  });
  for_each_in_parallel(count > 1 ? blocks : 0, [&](int64_t block) {
    kernels.gradient_of_weight(shape, all + block * count * size, count, block, to);
  });
  return grad_weight;
}

// ---- As a differentiable function ----------------------------------------------------------------------------------

struct WinogradConvolution : torch::autograd::Function<WinogradConvolution> {
  // `bias` is optional, since autograd takes no undefined inputs.
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight,
                        const std::optional<Tensor>& bias) {
    ctx->saved_data["has_bias"] = bias.has_value();
    ctx->save_for_backward({x, weight});
    const Tensor y = convolve(x, weight, /*for_gradient=*/false);
    return bias ? y.add_(bias->view({-1, 1, 1})) : y;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const Tensor &x = saved[0], &weight = saved[1];
    variable_list result(3);
    if (ctx->saved_data["has_bias"].toBool() && ctx->needs_input_grad(2)) result[2] = grads[0].sum({0, 2, 3});
    if (at::GradMode::is_enabled()) {
      // Within FastKernels at::conv2d() would come here again.
      const Tensor y = at::convolution(x, weight, {}, /*stride=*/1, /*padding=*/1, /*dilation=*/1,
                                       /*transposed=*/false, /*output_padding=*/0, /*groups=*/1);
      const variable_list found = differentiable_gradients(y, grads[0], {x, weight});
      return {found[0], found[1], result[2]};
    }
    RECORD_USER_SCOPE_WITH_INPUTS("lockstep::conv2d_backward", read_by_kernels({weight}));
    const Tensor grad = grads[0].resolve_neg().contiguous(MemoryFormat::ChannelsLast);
    if (ctx->needs_input_grad(0)) result[0] = convolve(grad, weight, /*for_gradient=*/true);
    if (ctx->needs_input_grad(1)) result[1] = gradient_of_weight(x, grad);
    return result;
  }
};

bool is_one(at::IntArrayRef values) {
  return std::all_of(values.begin(), values.end(), [](int64_t value) { return value == 1; });
}

}  // namespace

Tensor fast_conv2d(const Tensor& x, const Tensor& weight, const Tensor& bias, at::IntArrayRef stride,
                   at::IntArrayRef padding, at::IntArrayRef dilation, int64_t groups) {
  const bool suits =
      is_one(stride) && is_one(padding) && is_one(dilation) && groups == 1 && suits_winograd(x, weight, bias);
  if (!suits) return at::conv2d(x, weight, bias, stride, padding, dilation, groups);
  RECORD_USER_SCOPE_WITH_INPUTS("lockstep::conv2d", read_by_kernels({weight, bias}));
  return WinogradConvolution::apply(x, weight, bias.defined() ? std::optional(bias) : std::nullopt);
}

Tensor fast_conv2d(torch::nn::Conv2dImpl& conv, const Tensor& x) {
  const auto& options = conv.options;
  const auto* const padding = std::get_if<torch::ExpandingArray<2>>(&options.padding());
  if (padding == nullptr || !std::holds_alternative<torch::enumtype::kZeros>(options.padding_mode())) {
    return conv.forward(x);
  }
  return fast_conv2d(x, conv.weight, conv.bias, options.stride(), *padding, options.dilation(), options.groups());
}

}  // namespace lockstep
