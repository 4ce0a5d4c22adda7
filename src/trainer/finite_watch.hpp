// FiniteWatch looks whether the losses and gradients of a run's steps are finite. All ranks get the same answer.
//
// A step is judged by its gradients alone, since a loss that is not finite gives gradients that are not (see step.cpp).
// Averaged gradients are the same on all ranks, and so are the answers. Ranks with their own gradients ask each other.
// A single rank's GPU looks at the losses themselves, which saves a kernel.
//
// On a GPU the answer about a step comes to the host while the next step is queued, and is read after that step's
// backward. So the GPU always has work, and every rank reads the answer at the same place. By then that step's update
// was queued, which leaves everything as it was if mark() has found something (Update::skip_where). So do the next
// ones. An optimizer that does not look there has taken the step.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <lockstep/trainer/train_options.hpp>

#include "update.hpp"

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace lockstep {

// HostCopy: copies a tensor's values to the host, which goes on meanwhile.
//
//   HostCopy copy(sum);              // queued on the current stream
//   … a step later …
//   if (copy.arrival()) wait_for(rank, *copy.arrival());  // the device has the work queued since then to do meanwhile
//   copy.values().item<double>();
//
// item() would wait for all that is queued so far, and the device would then have nothing to do. Use it from one
// thread. On the CPU there is nothing to wait for, and no copy.
class HostCopy {
 public:
  // Do not change a tensor of the CPU before its values are read.
  explicit HostCopy(const at::Tensor& tensor);

  // Gives the event of the values' arrival, or null if they are there.
  const c10::Event* arrival() const { return arrived_ ? &*arrived_ : nullptr; }

  // Gives the values, on the CPU. Wait for their arrival first: until then this memory holds anything.
  const at::Tensor& values() const { return values_; }

 private:
  at::Tensor values_;
  std::optional<c10::Event> arrived_;  // the event of the values' arrival; null: they are there
};

class FiniteWatch {
 public:
  // `update` has the gradients, and `loss` is the sum of the rank's losses in the epoch, in place. `ranks_differ` says
  // that ranks step with different gradients.
  FiniteWatch(const TrainOptions& options, const Rank& rank, const Update& update, at::Tensor loss, bool ranks_differ);

  void begin_step(int epoch, int64_t number) {  // `number` counts the epoch's steps from 1
    epoch_ = epoch;
    number_ = number;
  }
  bool judges_losses() const { return on_gpu() && rank_.world_size() == 1; }
  void add_loss(const at::Tensor& mean);  // takes the mean of the rank's part of the step, or of a part of that

  // Gives what mark() writes if updates on the GPU are to look at it, float [1]; undefined: they are not.
  at::Tensor found() const;

  // Lets a graph skip steps (GraphSkip in step.cpp), of which the host learns later. look() and settle() call `skipped`
  // for each such step, with what is wrong in words. `bad_loss` is the sum of losses in the last of them.
  void skip_in_graph(const at::Tensor& bad_loss, std::function<void(const std::string& wrong)> skipped) {
    bad_loss_ = bad_loss;
    skipped_ = std::move(skipped);
  }

  // Call it when a step's gradients are there. With `on_nan` "stop" watch() looks at them; on a GPU it asks, and looks
  // at the answer about the step before. With local SGD it looks when a round ends, where ranks learn of each other.
  void watch() {
    mark();
    look();
  }
  void settle();  // looks now at the step that is still open

  // These are the halves of watch(): queued work alone, which a graph can hold, and the rest.
  void mark();
  void look();

  // Looks at the step's gradients now. Says in words what is not finite; empty if all is. Call it on all ranks.
  std::string judge();

  // Notes why the run cannot go on.
  void give_up(const std::string& why) { complaint_ = why; }
  const std::string& complaint() const { return complaint_; }

 private:
  struct Step {  // a step whose loss and gradients may not be finite
    int64_t number = 0;
    std::optional<HostCopy> answer = std::nullopt;  // the mark of all ranks; null: they were not asked
    std::optional<HostCopy> loss = std::nullopt;    // bad_loss_, on the host before `answer` is; null: see loss_
  };
  bool on_gpu() const { return !rank_.device().is_cpu(); }
  void ask(Step& step);
  void add_up();
  std::string what_is_not_finite(Step& step);

  const OnNan on_nan_;
  const int64_t round_;  // steps of a round of local SGD; 0: ranks average gradients
  Rank rank_;
  const Update& update_;
  const bool ranks_differ_;
  int epoch_ = 0;
  int64_t number_ = 0;
  const at::Tensor loss_;
  // The mark of the gradients since the last answer. On the CPU the mark is a sum, which is finite if all is. On a GPU
  // the mark is 0 if all is finite, and stays 1 once something was not.
  const at::Tensor mark_;
  const at::Tensor one_;                                   // see find_not_finite
  std::vector<at::Tensor> losses_;                         // the step's losses, if they are judged
  std::function<void(const std::string& wrong)> skipped_;  // null: no graph skips
  at::Tensor bad_loss_;
  std::optional<Step> open_;  // the step that was not looked at yet
  std::string complaint_;
};

}  // namespace lockstep
