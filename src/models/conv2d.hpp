// fast_conv2d: convolves with a quarter of the products, for kernels of 3 x 3 with stride 1.
//
// It is Winograd's algorithm F(4 x 4, 3 x 3), with kernels of lockstep (docs/decisions/0082-larger-tiles.md). Errors
// are two to four times those of LibTorch's sums in float32, for values of mean 0. A value that is not finite reaches
// other pixels of the tiles that read it too. Where the weight is about 1, values above 1e36 may overflow.
// Deterministic: the bits depend on the values and shapes, and not on the number of intra-op threads. Memory until
// backward: x.
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
// and padding 1. All tensors are float32, and x is channels-last. Both numbers of channels are multiples of 32 (16 with
// AVX2). Images have enough pixels for tiles of 4 x 4: eight of 4 x 4 do for 128 channels. LibTorch
// computes all else, and throws as it does.
at::Tensor fast_conv2d(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, at::IntArrayRef stride,
                       at::IntArrayRef padding, at::IntArrayRef dilation, int64_t groups);

// Computes conv(x) by the function above.
at::Tensor fast_conv2d(torch::nn::Conv2dImpl& conv, const at::Tensor& x);

}  // namespace lockstep
