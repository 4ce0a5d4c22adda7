// Makes SGD, Adam and AdamW whose step is one call of LibTorch's fused kernel for all parameters of a group.
//
// torch::optim's C++ optimizers call up to 14 operators for each parameter; on a GPU each is a kernel. These classes
// have the same groups, options, states, save() and load(). So states and checkpoints of one fit the other. Results are
// equal but for rounding: a fused kernel rounds once where operators round one after the other. A step that the kernels
// cannot take is LibTorch's own: sparse gradients, amsgrad, several types or devices in one group, and tensors that lie
// in memory otherwise than their gradients. Use an optimizer from one thread. It waits for no GPU.
#pragma once

#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <vector>

namespace lockstep {

// Sets gradients to zero in one call, and in place: a CUDA graph and DataParallel's buckets rely on their memory.
void zero_gradients(const std::vector<at::Tensor>& parameters);

class FusedSgd : public torch::optim::SGD {
 public:
  using torch::optim::SGD::SGD;
  torch::Tensor step(LossClosure closure = nullptr) override;
};

class FusedAdam : public torch::optim::Adam {
 public:
  using torch::optim::Adam::Adam;
  torch::Tensor step(LossClosure closure = nullptr) override;
};

class FusedAdamW : public torch::optim::AdamW {
 public:
  using torch::optim::AdamW::AdamW;
  torch::Tensor step(LossClosure closure = nullptr) override;
};

}  // namespace lockstep
