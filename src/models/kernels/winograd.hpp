// Declares the arithmetic of Winograd's convolution F(4 x 4, 3 x 3) (Lavin and Gray 2015, section 4) on float32 in the
// CPU's memory. It has kernels of 3 x 3, stride 1 and one pixel of zeros around the image. Each instruction set has its
// own.
//
// A tile is 4 x 4 pixels of the result, which depend on a patch of 6 x 6 pixels of x. These 36 values, the weight and
// the tile are transformed, so that 36 products per pair of channels replace 144. So a convolution becomes 36 products
// of matrices, [tiles][channels] by [channels][out_channels]. Tiles are numbered over all images, row by row. Images
// are channels-last, [image][row][column][channel]; weights [out_channel][3][3][channel]. The kernels do not allocate,
// keep nothing and start no threads.
#pragma once

#include <cstdint>

namespace lockstep::kernels {

constexpr int kTilePixels = 4, kPatchPixels = kTilePixels + 2;  // a tile's side, and its patch's
constexpr int kTileValues = kPatchPixels * kPatchPixels;        // values of a transformed tile
constexpr int64_t kTilesAtOnce = 32;                            // the tiles whose values a cache holds

// This struct has no member functions: see conv_relu_pool.hpp.
struct WinogradShape {
  int64_t images, height, width;
  int64_t channels, out_channels;  // multiples of WinogradKernels::channels
  int64_t tiles;                   // the tiles of all images
};

// A weight for convolve. for_gradient makes it the one that gives x's gradient from y's: turned by 180 degrees, with
// exchanged channels. Then exchange the channels in the shape too.
struct WinogradWeight {
  const float* values;
  bool for_gradient;
  const float* transformed;  // all panels, or null: then each call of convolve transforms the weight
};

struct WinogradKernels {
  int64_t channels;  // a panel's out_channels

  // Sets a panel, [kTileValues][channel][out_channel], to the transformed weight of its out_channels from `first` on.
  void (*transform_weight)(const WinogradShape& shape, const float* weight, bool for_gradient, int64_t first,
                           float* panel);

  // Sets y at tiles [first, first + count), kTilesAtOnce at most. `scratch` needs convolve_scratch(shape) values.
  int64_t (*convolve_scratch)(const WinogradShape& shape);
  void (*convolve)(const WinogradShape& shape, const float* x, const WinogradWeight& weight, int64_t first,
                   int64_t count, float* scratch, float* y);

  // The gradient of the weight comes in blocks of channels, from 0 to gradient_blocks(shape), and each in two steps.
  // The first computes a part of a block's sums over tiles, those of tiles [first, first + count).
  int64_t block_products, gradient_scratch;  // the numbers of values of `products` and `scratch`
  int64_t (*gradient_blocks)(const WinogradShape& shape);
  void (*add_products)(const WinogradShape& shape, const float* x, const float* grad, int64_t block, int64_t first,
                       int64_t count, float* scratch, float* products);
  // The second adds `parts` such products, which lie one behind the other, and sets the block of the gradient.
  void (*gradient_of_weight)(const WinogradShape& shape, const float* products, int64_t parts, int64_t block,
                             float* grad_weight);
};

}  // namespace lockstep::kernels
