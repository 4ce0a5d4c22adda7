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
  LoopWarnings(const torch::nn::Module& net, const Rank& rank) : net_(net), rank_(rank) {}

  // A forward begins. Warns where the parameters changed from one to the next several times, though no backward was
  // ever averaged: gradients that torch::autograd::grad() or the user's own code gives pass no hook.
  void see_forward();

  // An averaged backward begins, of the batch with this mark; 0: not known. Warns where the net is in eval() mode and
  // has layers that act otherwise then, and where an epoch's shuffled order comes again.
  void see_backward(int32_t mark);

  // Looks at the mean loss of so many samples `of_batch`. Walks the graph of the first one that has one, and warns of a
  // learnable tensor that no DataParallel averages. One with as many rows as there are `samples` is taken for an input
  // whose gradient is wanted. Throws Error where the mean is over some of the samples' targets alone.
  void see_loss(const at::Tensor& mean, int64_t samples, int64_t of_batch);

  // Calls forward(), of a grain, and looks at it in the first grains. Warns where it drew from LibTorch's default
  // generator on the CPU, and where it changed a buffer of the net that is no running statistic. The first grain's may
  // be a cache that it fills.
  void see_grain(const std::function<void()>& forward);

 private:
  void see_mode();
  void see_order(int32_t mark);
  void see_leaves(const at::Tensor& loss, int64_t samples);
  void warn_once(bool& told, const std::string& text) const;

  const torch::nn::Module& net_;
  const Rank rank_;
  bool averages_ = false;                   // a backward was averaged, or see_forward() has warned
  at::Tensor parameter_, value_;            // the parameter that see_forward() watches, and its value
  int forwards_ = 0, changes_ = 0;          // forwards with parameter_, and its changes
  int32_t first_mark_ = 0, last_mark_ = 0;  // the marks of shuffled batches
  int grains_ = 0;                          // the number of grains that were looked at
  int targets_checked_ = 0;                 // the number of means checked on a GPU
  bool mode_seen_ = false, order_told_ = false, leaves_seen_ = false, draws_told_ = false, buffer_told_ = false;
};

}  // namespace lockstep
