// Declares the arithmetic of batch_norm_relu (src/models/batch_norm_relu.hpp) on float32 in the CPU's memory. It is
// compiled once per instruction set.
//
// Each call computes a range of the pixels: matrices [pixels][channels], as a channels-last image lies in memory.
// Ranges are small, so that values read twice in a call stay in the first-level cache. Values per channel are
// [channels]. The kernels do not allocate, keep nothing and start no threads.
#pragma once

#include <cstdint>

namespace lockstep::kernels {

// y = relu(x * scale + shift + shortcut). This struct has no member functions: see conv_relu_pool.hpp.
struct BatchNormReluChannels {
  const float *scale, *shift, *mean;
};

struct BatchNormReluKernels {
  // Sets the range's mean, and its sum of (x - mean)^2.
  void (*statistics)(const float* x, int64_t pixels, int64_t channels, float* mean, float* squares);

  // `shortcut` may be null.
  void (*forward)(const float* x, const float* shortcut, int64_t pixels, int64_t channels,
                  const BatchNormReluChannels& of, float* y);

  // Sets the range's sums of the gradient behind the ReLU, and of its product with x - mean. If there is a short cut, y
  // shows which values passed the ReLU, and `passed` gets the gradient behind it. Give null for both if there is none:
  // x shows the same.
  void (*backward_sums)(const float* grad, const float* x, const float* y, int64_t pixels, int64_t channels,
                        const BatchNormReluChannels& of, float* passed, float* sum, float* product);

  // grad_x = scale * (grad - offset - (x - mean) * slope). If there is a short cut, give `passed` as grad.
  void (*backward)(const float* grad, const float* x, bool shortcut, int64_t pixels, int64_t channels,
                   const BatchNormReluChannels& of, const float* offset, const float* slope, float* grad_x);
};

}  // namespace lockstep::kernels
