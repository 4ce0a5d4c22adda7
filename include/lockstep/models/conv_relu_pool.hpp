// conv_relu_pool: computes a convolution, ReLU and 2x2 average pooling as one operator. On CPUs images with few
// channels take a half to a tenth of the time of LibTorch's three operators (docs/decisions/0007-lenet-kernels.md). It
// can be differentiated, also twice.
//
// Float32 on the CPU takes lockstep's own kernels, which compute 16 samples at a time (8 or 4 on older CPUs).
// All else takes LibTorch's operators: fewer than a third of these samples, CUDA, other types, mixed precision.
// The result is the same up to rounding, but for NaN and infinity by AMX (docs/decisions/0084-amx-convolutions.md).
// Thread-safe: no shared state. Deterministic: the same inputs give the same bits, whatever the number of intra-op
// threads. Memory: until backward, a second copy of x and a byte per result.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <iosfwd>

namespace lockstep {

// Computes avg_pool2d(relu(conv2d(x, weight, bias)), 2). The convolution has stride 1 and no padding, the pooling
// stride 2. A last row or column that fills no block of 2 x 2 is left out, and not even computed.
//   x       [n, channels, height, width]
//   weight  [out_channels, channels, kernel_height, kernel_width], as torch::nn::Conv2d keeps it
//   bias    [out_channels], or undefined: none
//   returns [n, out_channels, (height - kernel_height + 1) / 2, (width - kernel_width + 1) / 2], contiguous
// Throws Error, which shows the shapes, for tensors that do not fit, or images too small for one pooled value.
at::Tensor conv_relu_pool(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias);

// Makes conv_relu_pool a module, for a torch::nn::Sequential. Its parameters have the names, shapes and first values of
// a torch::nn::Conv2d's.
class ConvReluPoolImpl : public torch::nn::Cloneable<ConvReluPoolImpl> {
 public:
  // The kernel is square, kernel x kernel. Throws Error for a size below 1.
  ConvReluPoolImpl(int64_t in_channels, int64_t out_channels, int64_t kernel);

  at::Tensor forward(const at::Tensor& x);  // computes conv_relu_pool()
  void reset() override;                    // draws new weights, uniformly, from LibTorch's generator
  void pretty_print(std::ostream& out) const override;

  at::Tensor weight, bias;

 private:
  int64_t in_channels_, out_channels_, kernel_;
};
TORCH_MODULE(ConvReluPool);

}  // namespace lockstep
