// GrainCheck: computes some of a batch's grains again and compares them. DataParallelOptions::grain_check is one.
//
// A replica calls it on the rank's thread, and note() on the thread that computes.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <lockstep/data/data.hpp>
#include <lockstep/nn/sample_scope.hpp>
#include <lockstep/ranks/rank.hpp>

#include <cstdint>
#include <functional>

namespace lockstep {

class GrainCheck {
 public:
  using MeanOf = std::function<at::Tensor(const Batch& grain)>;
  virtual ~GrainCheck() = default;

  // Gets the net and the rank to check, once. The module outlives this object.
  virtual void watch(const torch::nn::Module& module, const Rank& rank) = 0;

  // Is called before this rank's part of a batch is computed, or a part of that part. It may call mean_of() until
  // compare() is done.
  virtual void begin(const Batch& part, const SampleScope::Place& place, const MeanOf& mean_of) = 0;

  // Gets the `value` of a grain that training computed: the gradient of `parameter`, or the loss if `parameter` is
  // undefined.
  virtual void note(int64_t grain, const at::Tensor& parameter, const at::Tensor& value) = 0;

  // Is called on all ranks once the step's gradients are averaged, and before parameters change.
  virtual void compare() = 0;
};

}  // namespace lockstep
