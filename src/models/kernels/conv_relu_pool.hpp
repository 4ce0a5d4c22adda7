// Declares the arithmetic of conv_relu_pool (include/lockstep/models/conv_relu_pool.hpp) on float32 in the CPU's
// memory. It is compiled once per instruction set.
//
// The layout makes it fast. A block has as many samples as a vector register has lanes, and the sample's index is
// innermost. So every step of the computation is the same for all lanes, and odd numbers of channels or odd widths
// leave no lane idle. The kernels read and write these shapes, where "lane" is the sample in the block:
//   x, grad_x   [channel][row][column][lane]
//   out, grad   [out_channel][pooled row][pooled column][lane]
//   passed      [pooled row][pooled column][out_channel][lane], bytes: bit i is set if pixel i of the 2x2 block passed
//               the ReLU
// The kernels do not allocate, keep nothing and start no threads.
#pragma once

#include <cstdint>

namespace lockstep::kernels {

// This struct has no member functions, since the header is compiled for several instruction sets. The linker keeps any
// one copy of an inline function, perhaps one that this CPU cannot run.
struct ConvReluPoolShape {
  int64_t channels, height, width;
  int64_t out_channels, kernel_height, kernel_width;
  int64_t pooled_height, pooled_width;
};

// Computes a layer, by vectors or, in blocks of 16 samples, by AMX (amx.hpp). Both take the same shapes but for
// `packed`. Each `scratch` needs scratch_size(shape) values.
struct ConvReluPoolPasses {
  int64_t (*scratch_size)(const ConvReluPoolShape& shape);

  // Packs the weight in the order in which forward and backward_input read it. `packed` has packed_size(shape) values.
  int64_t (*packed_size)(const ConvReluPoolShape& shape);
  void (*pack_for_forward)(const ConvReluPoolShape& shape, const float* weight, float* packed);
  void (*pack_for_backward)(const ConvReluPoolShape& shape, const float* weight, float* packed);

  // Computes one block.
  void (*forward)(const ConvReluPoolShape& shape, const float* x, const float* packed, const float* bias,
                  float* scratch, float* out, uint8_t* passed);

  // Sets one block's gradient.
  void (*backward_input)(const ConvReluPoolShape& shape, const float* grad, const uint8_t* passed, const float* packed,
                         float* scratch, float* grad_x);

  // Sets one group's part of grad_weight and grad_bias, over all blocks; give at least one block. Groups count from 0
  // to `groups` - 1, and `groups` is weight_groups(shape, threads). Bits do not depend on it.
  int64_t (*weight_groups)(const ConvReluPoolShape& shape, int64_t threads);
  void (*backward_weight)(const ConvReluPoolShape& shape, int64_t blocks, int64_t group, int64_t groups, const float* x,
                          const float* grad, const uint8_t* passed, float* scratch, float* grad_weight,
                          float* grad_bias);
};

struct ConvReluPoolKernels {
  int64_t lanes;  // samples per block

  // Converts between `samples` (at most `lanes`) rows of `size` values and one block [size][lane]. Lanes without a
  // sample are 0.
  void (*to_block)(const float* rows, int64_t samples, int64_t size, float* block);
  void (*from_block)(const float* block, int64_t samples, int64_t size, float* rows);

  ConvReluPoolPasses passes;
};

}  // namespace lockstep::kernels
