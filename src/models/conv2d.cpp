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

int64_t parts_of(int64_t count, int64_t most) {
  return (count + most - 1) / most;
}

WinogradShape shape_of(const Tensor& x, int64_t out_channels) {
  const int64_t images = x.size(0), height = x.size(2), width = x.size(3);
  const int64_t tiles = images * parts_of(height, kernels::kTilePixels) * parts_of(width, kernels::kTilePixels);
  return {images, height, width, x.size(1), out_channels, tiles};
}

// A tile costs as much as 4 pixels without tiles. Few pixels do not pay for transforming the weight.
bool has_enough_pixels(const WinogradShape& shape) {
  const int64_t pixels = shape.images * shape.height * shape.width;
  return 4 * shape.tiles + 32 + (shape.channels + shape.out_channels) / 4 <= pixels;
}

bool suits_winograd(const Tensor& x, const Tensor& weight, const Tensor& bias) {
  const WinogradKernels* const kernels = kernels::of_this_cpu().winograd;
  return kernels != nullptr && suits_winograd(x) && suits_winograd(weight) && weight.size(2) == 3 &&
         weight.size(3) == 3 && x.is_contiguous(MemoryFormat::ChannelsLast) && x.size(1) == weight.size(1) &&
         weight.size(0) % kernels->channels == 0 && weight.size(1) % kernels->channels == 0 &&
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
  const int64_t calls = parts_of(shape.tiles, kTilesAtOnce);
  const Tensor taps = weight.contiguous(MemoryFormat::ChannelsLast);
  WinogradWeight factor{taps.const_data_ptr<float>(), for_gradient, nullptr};
  Tensor transformed;
  // A thread with one call transforms panels one by one, since a whole transformed weight leaves the cache.
  if (calls > at::get_num_threads()) {
    const int64_t panel = kernels::kTileValues * shape.channels * kernels.channels,
                  panels = shape.out_channels / kernels.channels;
    transformed = at::empty({panels * panel}, at::kFloat);
    auto* const to = transformed.mutable_data_ptr<float>();
    for_each_in_parallel(panels, [&](int64_t i) {
      kernels.transform_weight(shape, factor.values, for_gradient, i * kernels.channels, to + i * panel);
    });
    factor.transformed = to;
  }

  Tensor y = channels_last({shape.images, shape.out_channels, shape.height, shape.width});
  const auto* const from = x.const_data_ptr<float>();
  auto* const to = y.mutable_data_ptr<float>();
  for_each_with_scratch(kernels.convolve_scratch(shape), calls, [&](int64_t i, float* scratch) {
    const int64_t first = i * kTilesAtOnce;
    kernels.convolve(shape, from, factor, first, std::min(kTilesAtOnce, shape.tiles - first), scratch, to);
  });
  return y;
}

// Computes sums of its own for each of a few parts of all images' tiles. The parts depend on the shape alone.
Tensor gradient_of_weight(const Tensor& x, const Tensor& grad) {
  const WinogradKernels& kernels = *kernels::of_this_cpu().winograd;
  const WinogradShape shape = shape_of(x, grad.size(1));
  const int64_t in_part = kTilesAtOnce * parts_of(std::max<int64_t>(256, shape.tiles / 16), kTilesAtOnce);
  const int64_t parts = parts_of(shape.tiles, in_part), blocks = kernels.gradient_blocks(shape);
  const Tensor products = at::empty({parts > 1 ? blocks * parts * kernels.block_products : 0}, at::kFloat);
  Tensor grad_weight = channels_last({shape.out_channels, shape.channels, 3, 3});
  const auto* const from = x.const_data_ptr<float>();
  const auto* const of_y = grad.const_data_ptr<float>();
  auto* const sums = products.mutable_data_ptr<float>();
  auto* const to = grad_weight.mutable_data_ptr<float>();
  const int64_t scratch_size = kernels.gradient_scratch + kernels.block_products;
  for_each_with_scratch(scratch_size, blocks * parts, [&](int64_t i, float* scratch) {
    const int64_t block = i / parts, first = i % parts * in_part;
    auto* const sum = parts > 1 ? sums + i * kernels.block_products : scratch + kernels.gradient_scratch;
    kernels.add_products(shape, from, of_y, block, first, std::min(in_part, shape.tiles - first), scratch, sum);
    if (parts == 1) kernels.gradient_of_weight(shape, sum, parts, block, to);  // while the cache has the products
  });
  if (parts == 1) return grad_weight;
  for_each_in_parallel(blocks, [&](int64_t block) {
    kernels.gradient_of_weight(shape, sums + block * parts * kernels.block_products, parts, block, to);
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
