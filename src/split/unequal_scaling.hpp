// UnequalScaling: notices gradients that ranks with different parts of one network scaled by different factors, as
// torch's clip_grad_norm_ does, whose norm is of one rank's part. SplitModel uses it. Used by its rank's thread only.
// Cost: a copy of one small gradient in each backward, and in each check a message of 16 bytes over both axes.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <lockstep/split/mesh.hpp>

#include <cstdint>

namespace lockstep {

class UnequalScaling {
 public:
  explicit UnequalScaling(const Mesh& mesh) : mesh_(mesh) {}

  // A backward has ended, or every rank scaled by one factor: changes from now on are compared. On GPUs only in the
  // first steps, and on CPUs later in every tenth step.
  void note(const torch::nn::Module& module);

  // Throws Error if the factors since note() differ. Other changes are not its business, and zeros hide it. All ranks
  // of a data index must call it, and note() as often.
  void check();

 private:
  bool compares();

  Mesh mesh_;
  int64_t notes_ = 0;
  bool noted_ = false;
  at::Tensor gradient_, value_;  // undefined: nothing says anything about a factor
};

}  // namespace lockstep
