// Declares the arithmetic of Winograd's convolution F(4 x 4, 3 x 3) (Lavin and Gray 2015, section 4) on float32 in the
// CPU's memory. It has kernels of 3 x 3, stride 1 and one pixel of zeros around the image. Each instruction set has its
// own.
//
// A tile is 4 x 4 pixels of the result, which depend on a patch of 6 x 6 pixels of x. These 36 values, the weight and
// the tile are transformed, so that 36 products per pair of channels replace 144. So a convolution becomes 36 products
// of matrices, [tiles][channels] by [channels][out_channels]. A panel is the transformed weight of a few out_channels,
// [kTileValues][channel][out_channel]. Tiles are numbered over all images, row by row. Images are channels-last,
// [image][row][column][channel]; weights [out_channel][3][3][channel]. The kernels do not allocate, keep nothing and
// start no threads.
#pragma once

#include <cstdint>

namespace lockstep::kernels {

constexpr int kTileSide = 4, kPatchSide = kTileSide + 2;
constexpr int kTileValues = kPatchSide * kPatchSide;  // values of a transformed tile
constexpr int64_t kTilesAtOnce = 32;                  // the most tiles of a call of convolve

// This struct has no member functions: see conv_relu_pool.hpp.
struct WinogradShape {
  int64_t images, height, width;
  int64_t channels, out_channels;  // multiples of WinogradKernels::panel_channels
  int64_t tiles;                   // the tiles of all images
};

// convolve takes this weight. With for_gradient the weight is turned by 180 degrees and its channels are exchanged: so
// x's gradient comes from y's. Then exchange the channels in the shape too.
struct WinogradWeight {
  const float* values;
  bool for_gradient;
  const float* panels;  // all panels, or null: then each call of convolve makes those of its out_channels
};

struct WinogradKernels {
  int64_t panel_channels;

  // Sets the panel of the out_channels from `first` on.
  void (*transform_weight)(const WinogradShape& shape, const WinogradWeight& weight, int64_t first, float* panel);

  // Sets out_channels [begin, end) of y at tiles [first, first + count). `scratch` needs convolve_scratch(shape)
  // values.
  int64_t (*convolve_scratch)(const WinogradShape& shape);
  void (*convolve)(const WinogradShape& shape, const float* x, const WinogradWeight& weight, int64_t first,
                   int64_t count, int64_t begin, int64_t end, float* scratch, float* y);

  // The gradient of the weight comes in gradient_blocks(shape) blocks of channels, each in two steps. The first
  // computes a part of a block's sums over tiles, those of tiles [first, first + count).
  int64_t gradient_scratch;  // the number of values of `scratch`
  int64_t (*gradient_blocks)(const WinogradShape& shape);
  int64_t (*block_products)(const WinogradShape& shape);  // the number of values of `products`
  void (*add_products)(const WinogradShape& shape, const float* x, const float* grad, int64_t block, int64_t first,
                       int64_t count, float* scratch, float* products);
  // The second adds `parts` such products, block_products(shape) values apart, and sets the block of the gradient.
  void (*gradient_of_weight)(const WinogradShape& shape, const float* products, int64_t parts, int64_t block,
                             float* grad_weight);
};

}  // namespace lockstep::kernels
