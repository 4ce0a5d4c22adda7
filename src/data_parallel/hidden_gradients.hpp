// HiddenGradients: the gradients of a net of which each rank has a part. `.grad` is undefined outside of backwards, so
// that LibTorch's optimizers and clip_grad_norm_ cannot take a part for the whole network. Nor does LibTorch's
// zero_grad() clear gradients, so this class notes whether a step has used them already.
//
// Use it from the rank's thread only. Cost: a pointer moves for each parameter, in each backward and step.
#pragma once

#include <torch/nn/module.h>

#include <vector>

namespace lockstep {

class HiddenGradients {
 public:
  explicit HiddenGradients(const torch::nn::Module& module);

  // Say true after a step, and false when the gradients are cleared.
  void set_used(bool used) { used_ = used; }
  bool are_used() const { return used_; }

  // Shows the gradients in `.grad` while it lives, together with gradients that other backwards have added there.
  // Guards nest. For a null `hidden` it does nothing.
  class Shown {
   public:
    explicit Shown(HiddenGradients* hidden);
    ~Shown();
    Shown& operator=(Shown&&) = delete;

   private:
    HiddenGradients* const hidden_;
  };

 private:
  void hide();

  std::vector<at::Tensor> parameters_;
  std::vector<at::Tensor> gradients_;
  int shown_ = 0;
  bool used_ = false;
};

}  // namespace lockstep
