// fast_conv2d: convolves with 4 products where others take 9, for kernels of 3 x 3 with stride 1.
//
// It is Winograd's algorithm F(2 x 2, 3 x 3), with kernels of lockstep (docs/decisions/0040-winograd.md). Errors are
// those of a sum in float32, as with LibTorch. An infinity may become NaN in the pixels that read it, and values above
// 8e37 may overflow. Deterministic: the bits depend on the values and shapes, and not on the number of intra-op
// threads. Memory until backward: x.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/modules/conv.h>

#include <cstdint>

namespace lockstep {

// Computes torch::conv2d(), which can be differentiated, also twice.
//   x        [n, in_channels, height, width]
//   weight   [out_channels, in_channels / groups, kernel_height, kernel_width]
//   bias     [out_channels], or undefined: none
//   returns  torch::conv2d()'s result, in x's memory format
// lockstep's kernels compute it on CPUs with AVX2 or AVX-512 under some conditions. The kernel is 3 x 3 with stride 1
// and padding 1. All tensors are float32, and x is channels-last. y has at least 8 tiles of 2 x 2 pixels in all. Both
// numbers of channels are multiples of 32 (16 with AVX2). LibTorch computes all else, and throws as it does.
at::Tensor fast_conv2d(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, at::IntArrayRef stride,
                       at::IntArrayRef padding, at::IntArrayRef dilation, int64_t groups);

// Computes conv(x) by the function above.
at::Tensor fast_conv2d(torch::nn::Conv2dImpl& conv, const at::Tensor& x);

}  // namespace lockstep
