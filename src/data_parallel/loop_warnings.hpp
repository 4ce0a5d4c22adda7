// LoopWarnings: tells a user once of what looks like a mistake in the training loop but may be meant. Replica asks it.
// Rank 0 warns, through RunOptions::on_warning. Used by its rank's thread only. Cost: a few comparisons per backward.
#pragma once

#include <torch/nn/module.h>
#include <lockstep/ranks/rank.hpp>

#include <cstdint>
#include <functional>
#include <string>

namespace lockstep {

class LoopWarnings {
 public:
  // A forward begins. Warns where the parameters changed from one to the next several times, though no backward was
  // ever averaged: gradients that torch::autograd::grad() or the user's own code gives pass no hook.
  void see_forward(const torch::nn::Module& net, const Rank& rank);

  // An averaged backward begins, of the batch with this mark; 0: not known. Warns where the net is in eval() mode and
  // has layers that act otherwise then, and where an epoch's shuffled order comes again.
  void see_backward(const torch::nn::Module& net, int32_t mark, const Rank& rank);

  // Walks the graph of the first loss that has one. Warns of a learnable tensor that no DataParallel averages. One with
  // as many rows as the part has `samples` is taken for an input whose gradient is wanted.
  void see_loss(const at::Tensor& loss, int64_t samples, const Rank& rank);

  // Throws Error where the mean loss of so many samples `of_batch` is over some of their targets alone.
  void check_targets(const at::Tensor& mean, int64_t samples, int64_t of_batch, const Rank& rank);

  // Calls forward(), of a grain, and looks at it in the first grains. Warns where it drew from LibTorch's default
  // generator on the CPU, and where it changed a buffer of the net that is no running statistic. The first grain's may
  // be a cache that it fills.
  void see_grain(const std::function<void()>& forward, const torch::nn::Module& net, const Rank& rank);

 private:
  void see_mode(const torch::nn::Module& net, const Rank& rank);
  void see_order(int32_t mark, const Rank& rank);
  void tell_of_draws(const Rank& rank);
  void tell_of_buffer(const std::string& name, const Rank& rank);

  bool averages_ = false;                   // a backward was averaged, or see_forward() has warned
  at::Tensor parameter_, value_;            // the parameter that see_forward() watches, and its value
  int forwards_ = 0, changes_ = 0;          // forwards with parameter_, and its changes
  int32_t first_mark_ = 0, last_mark_ = 0;  // the marks of shuffled batches
  int grains_ = 0;                          // the number of grains that were looked at
  int targets_checked_ = 0;                 // the number of means checked on a GPU
  bool mode_told_ = false, order_told_ = false, loss_seen_ = false, draws_told_ = false, buffer_told_ = false;
};

}  // namespace lockstep
