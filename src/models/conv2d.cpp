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
using kernels::WinogradKernels;
using kernels::WinogradShape;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

bool suits_winograd(const Tensor& tensor) {
  return is_plain_float(tensor) && tensor.dim() == 4 && tensor.numel() > 0;
}

WinogradShape shape_of(const Tensor& x, int64_t out_channels) {
  return {.images = x.size(0),
          .height = x.size(2),
          .width = x.size(3),
          .channels = x.size(1),
          .out_channels = out_channels};
}

// Transforming the weight of many channels costs more than it saves if there are fewer tiles.
constexpr int64_t kLeastTiles = 8;

bool suits_winograd(const Tensor& x, const Tensor& weight, const Tensor& bias) {
  const WinogradKernels* const kernels = kernels::of_this_cpu().winograd;
  return kernels != nullptr && suits_winograd(x) && suits_winograd(weight) && weight.size(2) == 3 &&
         weight.size(3) == 3 && x.is_contiguous(MemoryFormat::ChannelsLast) && x.size(1) == weight.size(1) &&
         weight.size(0) % kernels->channels == 0 && weight.size(1) % kernels->channels == 0 &&
         (!bias.defined() || (is_plain_float(bias) && bias.sizes() == at::IntArrayRef({weight.size(0)}))) &&
         kernels->count_tiles(shape_of(x, weight.size(0))) >= kLeastTiles &&
         !at::autocast::is_autocast_enabled(at::kCPU);  // mixed precision would compute it in bfloat16
}

Tensor channels_last(at::IntArrayRef sizes) {
  return at::empty(sizes, at::TensorOptions(at::kFloat).memory_format(MemoryFormat::ChannelsLast));
}

Tensor transformed_weight(const Tensor& weight, bool for_gradient) {
  const WinogradKernels& kernels = *kernels::of_this_cpu().winograd;
  const Tensor from = weight.contiguous(MemoryFormat::ChannelsLast),
               transformed = at::empty({16 * weight.numel() / 9}, at::kFloat);
  const auto* const values = from.const_data_ptr<float>();
  auto* const to = transformed.mutable_data_ptr<float>();
  in_parallel(weight.size(0) / kernels.weight_channels, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      kernels.transform_weight(weight.size(1), weight.size(0), values, i * kernels.weight_channels, for_gradient, to);
    }
  });
  return transformed;
}

// Convolves x. If for_gradient is set, x is the gradient of a convolution's result, and the result that of its input.
Tensor convolve(const Tensor& x, const Tensor& weight, bool for_gradient) {
  const WinogradKernels& kernels = *kernels::of_this_cpu().winograd;
  const WinogradShape shape = shape_of(x, weight.size(for_gradient ? 1 : 0));
  const Tensor transformed = transformed_weight(weight, for_gradient);
  Tensor y = channels_last({shape.images, shape.out_channels, shape.height, shape.width});
  const int64_t tiles = kernels.count_tiles(shape);
  const auto* const from = x.const_data_ptr<float>();
  const auto* const weights = transformed.const_data_ptr<float>();
  auto* const to = y.mutable_data_ptr<float>();
  in_parallel((tiles + kernels.tiles - 1) / kernels.tiles, [&](int64_t begin, int64_t end) {
    const Tensor scratch = at::empty({kernels.convolve_scratch(shape)}, at::kFloat);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t first = i * kernels.tiles;
      kernels.convolve(shape, from, weights, first, std::min(kernels.tiles, tiles - first),
                       scratch.mutable_data_ptr<float>(), to);
    }
  });
  return y;
}

// Computes sums of its own for each of a few parts of all images' tiles. The parts depend on the shape alone.
Tensor gradient_of_weight(const Tensor& x, const Tensor& grad) {
  const WinogradKernels& kernels = *kernels::of_this_cpu().winograd;
  const WinogradShape shape = shape_of(x, grad.size(1));
  const int64_t tiles = kernels.count_tiles(shape);
  const int64_t in_part = (std::max<int64_t>(512, tiles / 16) + kernels.tiles - 1) / kernels.tiles * kernels.tiles;
  const int64_t parts = (tiles + in_part - 1) / in_part, blocks = kernels.gradient_blocks(shape);
  const int64_t in_products = 16 * shape.out_channels * shape.channels;
  const Tensor products = at::empty({parts, in_products}, at::kFloat);
  const auto* const from = x.const_data_ptr<float>();
  const auto* const of_y = grad.const_data_ptr<float>();
  auto* const sums = products.mutable_data_ptr<float>();
  in_parallel(parts * blocks, [&](int64_t begin, int64_t end) {
    const Tensor scratch = at::empty({kernels.gradient_scratch(shape)}, at::kFloat);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t part = i / blocks, first = part * in_part;
      kernels.add_products(shape, from, of_y, i % blocks, first, std::min(in_part, tiles - first),
                           scratch.mutable_data_ptr<float>(), sums + part * in_products);
    }
  });

  Tensor grad_weight = channels_last({shape.out_channels, shape.channels, 3, 3});
  auto* const to = grad_weight.mutable_data_ptr<float>();
  in_parallel(shape.out_channels, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) kernels.gradient_of_weight(shape, sums, parts, i, to);
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
