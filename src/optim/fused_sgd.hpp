// FusedSgd: plain SGD whose update is one call of LibTorch's fused kernel for all parameters.
//
// torch::optim::SGD calls an operator per parameter; on a GPU that is a kernel each. LibTorch's C++ optimizers have no
// fused form, but ATen has the kernel, on the CPU and on CUDA. Tested against torch::optim::SGD. Used by one thread.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace lockstep {

class FusedSgd {
 public:
  // `parameters` of one type on one device. Throws Error if they are not.
  FusedSgd(std::vector<at::Tensor> parameters, double lr);

  // Sets gradients to zero in place, so that a CUDA graph and DataParallel's buckets find them there again.
  void zero_grad();

  // For the steps to come. Steps that a CUDA graph has recorded keep their learning rate.
  void set_lr(double lr) { lr_ = lr; }

  // w -= lr * gradient; a parameter without a gradient stays what it is.
  void step();

 private:
  const std::vector<at::Tensor> parameters_;
  double lr_;
};

}  // namespace lockstep
