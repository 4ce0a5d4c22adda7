#include "batch_norm_relu.hpp"

#include <ATen/ops/batch_norm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/where.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>

#include "intra_op.hpp"
#include "models/kernels/kernels.hpp"
#include "own_kernels.hpp"

#include <algorithm>
#include <cmath>
#include <optional>
#include <vector>

namespace lockstep {
namespace {

using at::MemoryFormat;
using at::Tensor;
using kernels::BatchNormReluChannels;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

bool suits_pixel_kernels(const Tensor& image) {
  return is_plain_float(image) && image.dim() == 4 && image.is_contiguous(MemoryFormat::ChannelsLast);
}

bool suits_pixel_kernels(const torch::nn::BatchNorm2dImpl& norm) {
  if (!norm.is_training() || !norm.options.momentum() || !norm.options.track_running_stats()) return false;
  const auto of_channels = {norm.weight, norm.bias, norm.running_mean, norm.running_var};
  return std::all_of(of_channels.begin(), of_channels.end(), [&](const Tensor& values) {
    return is_plain_float(values) && values.is_contiguous() && values.numel() == norm.options.num_features();
  });
}

// ---- The kernels over all pixels -----------------------------------------------------------------------------------

// Divides the pixels of an image into ranges that depend on the image's shape alone. A range has 16 kB of values, so
// that one range from each of three images fits into the first-level cache.
RowRanges pixels_of(const Tensor& image) {
  const int64_t channels = image.size(1);
  return {image.numel() / channels, channels, std::max<int64_t>(16, 4096 / channels)};
}

// The second pass over an image begins where the first has ended, since the cache still holds these pixels.
template <class Body>
void for_ranges_from_the_last(const RowRanges& pixels, const Body& body) {
  in_parallel(pixels.count(), [&](int64_t begin, int64_t end) {
    for (int64_t range = end; range-- > begin;) body(range);
  });
}

// Makes two rows per range, [range][2][channel], which body(range, first row, second row) sets.
template <class Body>
Tensor of_each_range(const RowRanges& pixels, const Body& body) {
  const Tensor values = at::empty({pixels.count(), 2, pixels.size}, at::kFloat);
  auto* const to = values.mutable_data_ptr<float>();
  for_each_in_parallel(pixels.count(), [&](int64_t range) {
    float* const first = to + 2 * range * pixels.size;
    body(range, first, first + pixels.size);
  });
  return values;
}

struct ImageStatistics {
  std::vector<double> mean;     // [channels]
  std::vector<double> squares;  // the sums of (x - mean)^2
};

// Merges the ranges' statistics as Chan et al. do (1979), in the order of the ranges and in float64.
ImageStatistics image_statistics(const Tensor& x, const RowRanges& pixels) {
  const auto* const from = x.const_data_ptr<float>();
  const Tensor parts = of_each_range(pixels, [&](int64_t range, float* mean, float* squares) {
    kernels::of_this_cpu().batch_norm_relu.statistics(from + pixels.first_value(range), pixels.rows_in(range),
                                                      pixels.size, mean, squares);
  });
  const auto channels = static_cast<size_t>(pixels.size);
  ImageStatistics all{std::vector<double>(channels), std::vector<double>(channels)};
  const auto for_parts = [&](const auto& body) {
    const auto* part = parts.const_data_ptr<float>();
    for (int64_t range = 0; range < pixels.count(); ++range, part += 2 * channels) {
      for (size_t c = 0; c < channels; ++c) {
        body(c, static_cast<double>(pixels.rows_in(range)), part[c], part[channels + c]);
      }
    }
  };
  for_parts([&](size_t c, double count, double mean, double) { all.mean[c] += count * mean; });
  for (double& mean : all.mean) mean /= static_cast<double>(pixels.rows);
  for_parts([&](size_t c, double count, double mean, double squares) {
    all.squares[c] += squares + count * (mean - all.mean[c]) * (mean - all.mean[c]);
  });
  return all;
}

// Moves the running statistics as LibTorch's BatchNorm does, and like it leaves the versions of these tensors alone.
void follow(torch::nn::BatchNorm2dImpl& norm, const ImageStatistics& batch, const RowRanges& pixels) {
  norm.num_batches_tracked += 1;
  const double momentum = *norm.options.momentum();
  auto* const mean = norm.running_mean.mutable_data_ptr<float>();
  auto* const variance = norm.running_var.mutable_data_ptr<float>();
  for (size_t c = 0; c < batch.mean.size(); ++c) {
    const double unbiased = batch.squares[c] / static_cast<double>(pixels.rows - 1);
    mean[c] = static_cast<float>((1 - momentum) * mean[c] + momentum * batch.mean[c]);
    variance[c] = static_cast<float>((1 - momentum) * variance[c] + momentum * unbiased);
  }
}

// Holds the values that the kernels need of each channel: [4][channels].
struct ChannelTable {
  Tensor rows;  // scale, shift, mean, 1 / sqrt(variance + eps)

  BatchNormReluChannels channels() const { return {row(0), row(1), row(2)}; }
  const float* inverse_deviation() const { return row(3); }

 private:
  const float* row(int64_t number) const { return rows.const_data_ptr<float>() + number * rows.size(1); }
};

ChannelTable channel_table(const torch::nn::BatchNorm2dImpl& norm, const ImageStatistics& batch,
                           const RowRanges& pixels) {
  const Tensor rows = at::empty({4, pixels.size}, at::kFloat);
  const auto* const weight = norm.weight.const_data_ptr<float>();
  const auto* const bias = norm.bias.const_data_ptr<float>();
  auto* const to = rows.mutable_data_ptr<float>();
  const auto channels = batch.mean.size();
  for (size_t c = 0; c < channels; ++c) {
    const double variance = batch.squares[c] / static_cast<double>(pixels.rows);
    const double inverse_deviation = 1 / std::sqrt(variance + norm.options.eps());
    const double scale = weight[c] * inverse_deviation;
    to[c] = static_cast<float>(scale);
    to[channels + c] = static_cast<float>(bias[c] - batch.mean[c] * scale);
    to[2 * channels + c] = static_cast<float>(batch.mean[c]);
    to[3 * channels + c] = static_cast<float>(inverse_deviation);
  }
  return {rows};
}

Tensor forward_with(const ChannelTable& table, const Tensor& x, const Tensor& shortcut) {
  const RowRanges pixels = pixels_of(x);
  Tensor y = at::empty_like(x);
  const auto* const from = x.const_data_ptr<float>();
  const auto* const added = shortcut.defined() ? shortcut.const_data_ptr<float>() : nullptr;
  auto* const to = y.mutable_data_ptr<float>();
  for_ranges_from_the_last(pixels, [&](int64_t range) {
    const int64_t at = pixels.first_value(range);
    kernels::of_this_cpu().batch_norm_relu.forward(from + at, added == nullptr ? nullptr : added + at,
                                                   pixels.rows_in(range), pixels.size, table.channels(), to + at);
  });
  return y;
}

struct NormGradients {
  Tensor x, weight, bias, shortcut;
};

// Give `y` if there is a short cut; else it may be undefined. Without needs_x the gradient of x is left out.
NormGradients backward_with(const ChannelTable& table, const Tensor& grad, const Tensor& x, const Tensor& y,
                            bool needs_x) {
  const RowRanges pixels = pixels_of(x);
  const bool adds = y.defined();
  NormGradients gradients;
  if (adds) gradients.shortcut = at::empty_like(x);
  const auto* const from = x.const_data_ptr<float>();
  const auto* const results = adds ? y.const_data_ptr<float>() : nullptr;
  const auto* const of_y = grad.const_data_ptr<float>();
  auto* const passed = adds ? gradients.shortcut.mutable_data_ptr<float>() : nullptr;
  const Tensor parts = of_each_range(pixels, [&](int64_t range, float* sum, float* product) {
    const int64_t at = pixels.first_value(range);
    kernels::of_this_cpu().batch_norm_relu.backward_sums(of_y + at, from + at, adds ? results + at : nullptr,
                                                         pixels.rows_in(range), pixels.size, table.channels(),
                                                         adds ? passed + at : nullptr, sum, product);
  });

  const auto channels = static_cast<size_t>(pixels.size);
  std::vector<double> sums(2 * channels);  // the sums of the gradient, and of its products
  const auto* part = parts.const_data_ptr<float>();
  for (int64_t range = 0; range < pixels.count(); ++range, part += 2 * channels) {
    for (size_t i = 0; i < 2 * channels; ++i) sums[i] += part[i];
  }
  gradients.weight = at::empty({pixels.size}, at::kFloat);
  gradients.bias = at::empty({pixels.size}, at::kFloat);
  std::vector<float> offset(channels), slope(channels);
  for (size_t c = 0; c < channels; ++c) {
    const double inverse_deviation = table.inverse_deviation()[c], product = sums[channels + c];
    const auto count = static_cast<double>(pixels.rows);
    gradients.weight.mutable_data_ptr<float>()[c] = static_cast<float>(product * inverse_deviation);
    gradients.bias.mutable_data_ptr<float>()[c] = static_cast<float>(sums[c]);
    offset[c] = static_cast<float>(sums[c] / count);
    slope[c] = static_cast<float>(product * inverse_deviation * inverse_deviation / count);
  }
  if (!needs_x) return gradients;

  gradients.x = at::empty_like(x);
  const auto* const behind_relu = adds ? passed : of_y;
  auto* const to = gradients.x.mutable_data_ptr<float>();
  for_ranges_from_the_last(pixels, [&](int64_t range) {
    const int64_t at = pixels.first_value(range);
    kernels::of_this_cpu().batch_norm_relu.backward(behind_relu + at, from + at, adds, pixels.rows_in(range),
                                                    pixels.size, table.channels(), offset.data(), slope.data(),
                                                    to + at);
  });
  return gradients;
}

// ---- As a differentiable function ----------------------------------------------------------------------------------

// Computes gradients that can be differentiated again, for create_graph.
NormGradients differentiable_norm_gradients(const Tensor& grad, const Tensor& x, const Tensor& weight,
                                            const Tensor& bias, const Tensor& y, double eps) {
  const Tensor normalised = at::batch_norm(x, weight, bias, {}, {}, /*training=*/true, /*momentum=*/0, eps,
                                           /*cudnn_enabled=*/false);
  const Tensor passed = at::where((y.defined() ? y : normalised) <= 0, 0, grad);
  const variable_list found = differentiable_gradients(normalised, passed, {x, weight, bias});
  return {found[0], found[1], found[2], y.defined() ? passed : Tensor()};
}

struct BatchNormReluFunction : torch::autograd::Function<BatchNormReluFunction> {
  // `shortcut` is optional, since autograd takes no undefined inputs.
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight, const Tensor& bias,
                        const std::optional<Tensor>& shortcut, const ChannelTable& table, double eps) {
    const Tensor y = forward_with(table, x, shortcut.value_or(Tensor()));
    ctx->save_for_backward({x, weight, bias, shortcut ? y : Tensor(), table.rows});
    ctx->saved_data["eps"] = eps;
    return y;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const Tensor &x = saved[0], &y = saved[3];
    NormGradients found;
    if (at::GradMode::is_enabled()) {
      found = differentiable_norm_gradients(grads[0], x, saved[1], saved[2], y, ctx->saved_data.at("eps").toDouble());
    } else {
      RECORD_USER_SCOPE("lockstep::batch_norm_relu_backward");
      found = backward_with({saved[4]}, grads[0].resolve_neg().contiguous(MemoryFormat::ChannelsLast), x, y,
                            ctx->needs_input_grad(0));
    }
    return {found.x, found.weight, found.bias, found.shortcut, Tensor(), Tensor()};
  }
};

}  // namespace

Tensor add_and_relu(const Tensor& y, const Tensor& shortcut) {
  return shortcut.defined() ? (y + shortcut).relu_() : y.relu_();
}

Tensor batch_norm_relu(torch::nn::BatchNorm2dImpl& norm, const Tensor& x, const Tensor& shortcut) {
  const bool suits = suits_pixel_kernels(x) && x.size(1) == norm.options.num_features() &&
                     x.numel() > x.size(1) &&  // LibTorch says what is wrong with one value per channel
                     (!shortcut.defined() || (suits_pixel_kernels(shortcut) && shortcut.sizes() == x.sizes())) &&
                     suits_pixel_kernels(norm);
  if (!suits) return add_and_relu(norm.forward(x), shortcut);
  RECORD_USER_SCOPE_WITH_INPUTS("lockstep::batch_norm_relu", read_by_kernels({norm.weight, norm.bias}));
  const RowRanges pixels = pixels_of(x);
  const ImageStatistics statistics = image_statistics(x, pixels);
  follow(norm, statistics, pixels);
  return BatchNormReluFunction::apply(x, norm.weight, norm.bias,
                                      shortcut.defined() ? std::optional(shortcut) : std::nullopt,
                                      channel_table(norm, statistics, pixels), norm.options.eps());
}

}  // namespace lockstep
