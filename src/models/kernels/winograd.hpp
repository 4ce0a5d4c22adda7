// Declares the arithmetic of Winograd's convolution F(2 x 2, 3 x 3) (Lavin and Gray 2015, section 4) on float32 in the
// CPU's memory. It has kernels of 3 x 3, stride 1 and one pixel of zeros around the image. Each instruction set has its
// own.
//
// A tile is 2 x 2 pixels of the result, which depend on 4 x 4 pixels of x. These 16 values, the weight and the tile are
// transformed, so that 16 products per pair of channels replace 36. So a convolution becomes 16 products of matrices,
// [tiles][channels] by [channels][out_channels]. Tiles are numbered over all images, row by row. Images are
// channels-last, [image][row][column][channel]; weights [out_channel][3][3][channel]. The kernels do not allocate, keep
// nothing and start no threads.
#pragma once

#include <cstdint>

namespace lockstep::kernels {

// This struct has no member functions: see conv_relu_pool.hpp.
struct WinogradShape {
  int64_t images, height, width;
  int64_t channels, out_channels;  // multiples of WinogradKernels::channels
};

struct WinogradKernels {
  int64_t channels;
  int64_t weight_channels;  // the number of out_channels that one call of transform_weight takes
  int64_t tiles;            // the most tiles that one call of convolve takes

  int64_t (*count_tiles)(const WinogradShape& shape);

  // Transforms out_channels [first, first + weight_channels) of a weight for convolve; in all there are 16 values per
  // pair of channels. for_gradient makes the weight that gives x's gradient from y's: turned by 180 degrees, with
  // exchanged channels. Then exchange the channels in convolve's shape too.
  void (*transform_weight)(int64_t channels, int64_t out_channels, const float* weight, int64_t first,
                           bool for_gradient, float* transformed);

  // Sets y at tiles [first, first + count). `scratch` needs convolve_scratch(shape) values.
  int64_t (*convolve_scratch)(const WinogradShape& shape);
  void (*convolve)(const WinogradShape& shape, const float* x, const float* transformed, int64_t first, int64_t count,
                   float* scratch, float* y);

  // The gradient of the weight comes in two steps. The first computes a part of the sums over tiles, `products`
  // [16][out_channel][channel], for tiles [first, first + count) and one block of channels. Blocks count from 0 to
  // gradient_blocks(shape).
  int64_t (*gradient_blocks)(const WinogradShape& shape);
  int64_t (*gradient_scratch)(const WinogradShape& shape);
  void (*add_products)(const WinogradShape& shape, const float* x, const float* grad, int64_t block, int64_t first,
                       int64_t count, float* scratch, float* products);
  // The second adds `parts` such products, which lie one behind the other, and sets one out_channel of the gradient.
  void (*gradient_of_weight)(const WinogradShape& shape, const float* products, int64_t parts, int64_t out_channel,
                             float* grad_weight);
};

}  // namespace lockstep::kernels
