// FiniteWatch: looks whether the losses and gradients of a run's steps are finite. All ranks get the same answer.
//
// A step is judged by its gradients alone, since a loss that is not finite makes them so (see step.cpp). Averaged
// gradients are the same on all ranks, and so is what follows from them. Ranks that step with others ask each other.
//
// On a GPU the answer about a step comes to the host while it queues the next one, and is read behind that one's
// backward: so the GPU always has work, and every rank reads it at the same place. By then the step was taken.
#pragma once

#include <lockstep/trainer/train_options.hpp>

#include "devices/host_copy.hpp"
#include "update.hpp"

#include <cstdint>
#include <optional>
#include <string>

namespace lockstep {

class FiniteWatch {
 public:
  // `update` has the gradients. `ranks_differ`: ranks step with different ones.
  FiniteWatch(const TrainOptions& options, const Rank& rank, const Update& update, bool ranks_differ);

  void begin_step(int epoch, int64_t number) {  // `number` counts the epoch's steps from 1
    epoch_ = epoch;
    number_ = number;
  }
  void add_loss(const at::Tensor& mean) { loss_.add_(mean); }  // the mean of this rank's batch, or of a part of it

  // A step's gradients are there. With `on_nan` "stop" it looks at them. On a GPU it asks, and looks at the answer
  // about the step before. With local SGD it looks when a round ends, where ranks learn of each other.
  void watch();
  void settle();  // looks now at what has not been looked at yet

  // Looks at the step's gradients now. Says in words what is not finite; empty if all is. Call it on all ranks.
  std::string judge();

  // Notes why the run cannot go on.
  void give_up(const std::string& why) { complaint_ = why; }
  const std::string& complaint() const { return complaint_; }

 private:
  struct Step {  // a step whose loss and gradients may not be finite
    int64_t number = 0;
    at::Tensor sum;                                 // sum of the step's gradients, finite if they are
    at::Tensor loss;                                // loss of this rank's part
    std::optional<HostCopy> answer = std::nullopt;  // sum over all ranks; null: they were not asked
  };
  Step take_step();
  void ask(Step& step);
  std::string what_is_not_finite(Step& step);

  const OnNan on_nan_;
  const int64_t round_;  // steps of a round of local SGD; 0: ranks average gradients
  Rank rank_;
  const Update& update_;
  const bool ranks_differ_;
  int epoch_ = 0;
  int64_t number_ = 0;
  at::Tensor loss_;           // the sum over the step's parts; in its place, so that a graph finds it
  std::optional<Step> open_;  // the step that was not looked at yet
  std::string complaint_;
};

}  // namespace lockstep
