// conv_relu_pool: a convolution, ReLU and 2x2 average pooling as one operator, on CPUs two to ten times as fast as the
// three of LibTorch for images with few channels (docs/decisions/0007-lenet-kernels.md). Differentiable, also twice.
//
// Float32 on the CPU takes lockstep's own kernels, which compute 16 samples at a time (8 or 4 on older CPUs);
// everything else (fewer than a third as many samples, CUDA, other types, mixed precision) takes LibTorch's operators,
// with the same result up to rounding. Thread-safe: no shared state. Deterministic: the same inputs give the same bits,
// whatever the number of intra-op threads. Memory: until backward a second copy of x and a byte per result.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <iosfwd>

namespace lockstep {

// avg_pool2d(relu(conv2d(x, weight, bias)), 2): stride 1 and no padding in the convolution, stride 2 in the pooling,
// which leaves out a last row and column that fill no block. Here these are not even computed.
//   x       [n, channels, height, width]
//   weight  [out_channels, channels, kernel_height, kernel_width], as torch::nn::Conv2d keeps it
//   bias    [out_channels], or undefined: none
//   returns [n, out_channels, (height - kernel_height + 1) / 2, (width - kernel_width + 1) / 2], contiguous
// Throws Error, which shows the shapes, for tensors that do not fit, or images too small for one pooled value.
at::Tensor conv_relu_pool(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias);

// The same as a module, for a torch::nn::Sequential: a torch::nn::Conv2d (its parameters' names, shapes and first
// values), ReLU and pooling in one.
class ConvReluPoolImpl : public torch::nn::Cloneable<ConvReluPoolImpl> {
 public:
  // The kernel is square, kernel x kernel. Throws Error for a size below 1.
  ConvReluPoolImpl(int64_t in_channels, int64_t out_channels, int64_t kernel);

  at::Tensor forward(const at::Tensor& x);  // as conv_relu_pool
  void reset() override;                    // draws new weights, uniformly, from LibTorch's generator
  void pretty_print(std::ostream& out) const override;

  at::Tensor weight, bias;

 private:
  int64_t in_channels_, out_channels_, kernel_;
};
TORCH_MODULE(ConvReluPool);

}  // namespace lockstep
