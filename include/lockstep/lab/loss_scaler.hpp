// LossScaler: scales the losses of a loop in float16, whose gradients would else be rounded to zero, as Python's
// torch.amp.GradScaler does. The scale follows the steps that overflow (Micikevicius et al. 2018, section 3.2).
//
//   lockstep::LossScaler scaler;
//   for (auto& batch : …) {
//     adam.zero_grad();
//     lockstep::Loss loss = [&] {
//       const lockstep::Autocast half(rank.device(), at::kHalf);
//       return net.loss(batch, criterion);
//     }();
//     scaler.scale(loss).backward();
//     scaler.step(adam);
//   }
//
// All ranks skip the same steps, so all have the same scale. Without a grain, a sample's gradients within backward do
// not depend on the number of ranks. So more ranks do not overflow earlier. Make one on each rank, and use it from
// that rank's thread only. Cost of a step: two passes over the gradients, and a wait for them on a GPU.
#pragma once

#include <lockstep/data/samples.hpp>
#include <lockstep/data_parallel/loss.hpp>
#include <lockstep/data_parallel/optimizer.hpp>

#include <cstdint>

namespace lockstep {

class LossScaler {
 public:
  struct Options {
    double scale = 65536;  // the scale in the beginning
    double growth = 2;     // the factor after `interval` steps without a skipped one
    double backoff = 0.5;  // the factor after a skipped step
    int64_t interval = 2000;
  };

  LossScaler() : LossScaler(Options()) {}
  // Give the same options on all ranks. Throws Error for a scale that is not above 0 and finite, a growth below 1, a
  // backoff outside of (0, 1], and an interval below 1.
  explicit LossScaler(const Options& options);

  // Makes backward() scale the gradients, and returns the same loss. Its value() stays as it is. Call it for each loss
  // of a step, also under no_sync() and of parts by in_parts(). Throws Error: a loss of a pipeline, which backward()
  // computes in parts; a grain_check beside grains. backward() then throws Error for a loss of 16 bits.
  Loss scale(const Loss& loss);

  // Divides the averaged gradients by the scale and steps; or if one is not finite, skips the step on all ranks, drops
  // the gradients, and lowers the scale. `options` may clip. Call it on all ranks. Throws Error for gradients of
  // float16, which hold no small numbers: leave the parameters in float32, and compute under an Autocast. Throws Error
  // too if no loss was scaled since the last step, and as Optimizer::step() does.
  Step step(Optimizer& optimizer, StepOptions options = {});

  double scale() const { return scale_; }

  // Gives what a run goes on from, for save_tensors(), and takes that. load_state() throws Error for other tensors.
  Dataset::Tensors state() const;
  void load_state(const Dataset::Tensors& state);

 private:
  const Options options_;
  double scale_;
  int64_t good_steps_ = 0;  // the steps in a row that were taken with this scale
  bool is_scaled_ = false;  // a loss was scaled since the last step
};

}  // namespace lockstep
