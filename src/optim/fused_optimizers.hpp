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

#include "device_numbers.hpp"

#include <optional>
#include <set>
#include <vector>

namespace lockstep {

// Sets gradients to zero in one call, and in place: a CUDA graph and DataParallel's buckets rely on their memory.
void zero_gradients(const std::vector<at::Tensor>& parameters);

// Fused is the part that the three share. A step has two halves, so that a graph can hold the second one: on a GPU the
// learning rate and the counts of steps are tensors there, which the first half writes where the host has others.
class Fused {
 public:
  virtual ~Fused() = default;

  // Does the first half of the next step, whose gradients are there or will be. Then step() does the second half alone.
  // Returns false, and does nothing, if the kernels cannot take the step.
  bool prepare();
  void forget_prepared() { is_prepared_ = false; }  // says that a graph has done the second half

  // Lets kernels on a GPU leave everything as it was where `found`, float [1], is not 0; the host counts the step
  // nevertheless. Undefined: they never do.
  void skip_where(const at::Tensor& found) { found_ = found; }

 protected:
  virtual bool fits() const = 0;  // tells whether the kernels can take the groups
  virtual void count() = 0;       // makes states, and counts
  virtual void queue() = 0;

  bool step_by_kernels();  // does what is left of the step; returns false, and does nothing, if the kernels cannot
  std::optional<at::Tensor> found() const { return found_.defined() ? std::optional(found_) : std::nullopt; }

  DeviceNumbers numbers_;

 private:
  at::Tensor found_;
  bool is_prepared_ = false;
};

class FusedSgd : public torch::optim::SGD, public Fused {
 public:
  using torch::optim::SGD::SGD;
  torch::Tensor step(LossClosure closure = nullptr) override;

 private:
  bool fits() const override;
  void count() override;
  void queue() override;

  std::set<const c10::TensorImpl*> fresh_;  // parameters whose momentum begins with this step
};

class FusedAdam : public torch::optim::Adam, public Fused {
 public:
  using torch::optim::Adam::Adam;
  torch::Tensor step(LossClosure closure = nullptr) override;

 private:
  bool fits() const override;
  void count() override;
  void queue() override;
};

class FusedAdamW : public torch::optim::AdamW, public Fused {
 public:
  using torch::optim::AdamW::AdamW;
  torch::Tensor step(LossClosure closure = nullptr) override;

 private:
  bool fits() const override;
  void count() override;
  void queue() override;
};

}  // namespace lockstep
