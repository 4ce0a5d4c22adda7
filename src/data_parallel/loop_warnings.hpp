// LoopWarnings: tells a user once of what looks like a mistake in the training loop but may be meant. Replica asks it.
// Rank 0 warns, through RunOptions::on_warning. Use it from the rank's thread only. Cost: a few comparisons per
// backward.
#pragma once

#include <torch/nn/module.h>
#include <lockstep/ranks/rank.hpp>

#include <cstdint>
#include <functional>
#include <string>
#include <utility>

namespace lockstep {

class LoopWarnings {
 public:
  LoopWarnings(const torch::nn::Module& net, const Rank& rank) : net_(net), rank_(rank) {}

  // Call it as a forward begins. Warns if parameters often changed between forwards, though no backward was ever
  // averaged: gradients that torch::autograd::grad() or the user's own code gives pass no hook.
  void see_forward();

  // Call it as an averaged backward begins, of the batch with this mark; 0: not known. Warns where the net is in eval()
  // mode and has layers that act otherwise then, and where an epoch's shuffled order comes again.
  void see_backward(int32_t mark);

  // Looks at the mean loss of so many samples `of_batch`. Walks the first mean's graph that there is, and warns of a
  // learnable tensor that no DataParallel averages. A tensor with as many rows as there are `samples` is taken for an
  // input whose gradient is wanted. Throws Error where the mean is over some of the samples' targets alone.
  void see_loss(const at::Tensor& mean, int64_t samples, int64_t of_batch);

  // Calls a grain's forward(), and watches the first grains. Warns where one drew from LibTorch's default generator on
  // the CPU, or changed a buffer of the net that is no running statistic. The first grain may change one, to fill a
  // cache.
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

// Notices parameters that a gradient of one rank alone has changed, and that so differ between the ranks.
// GradientBuckets uses it. Use it from one thread at a time.
class UnaveragedGradients {
 public:
  // Errors begin with `name`. It says which rank this is, and what the user calls the object.
  UnaveragedGradients(const Rank& rank, std::string name) : rank_(rank), name_(std::move(name)) {}

  // Notes that a backward which nobody averages has added to this parameter's gradient. This alone is no mistake: a
  // loss of another net may flow through this one, and zero_grad() follows. Throws Error as check() does, for a loop
  // that calls neither net(x) nor an averaged backward, and so never check().
  void note(const std::string& parameter_name, const at::Tensor& parameter);

  void forget();  // forgets the notes; call it as an averaged backward begins

  // Throws Error if the first parameter that was noted has changed since.
  void check() const;

 private:
  const Rank rank_;
  const std::string name_;
  const c10::TensorImpl* noted_parameter_ = nullptr;
  std::string parameter_name_;
  at::Tensor parameter_, value_;  // undefined: none was noted
  int noted_ = 0, compared_ = 0;  // how often a GPU's parameter was noted and compared
};

}  // namespace lockstep
