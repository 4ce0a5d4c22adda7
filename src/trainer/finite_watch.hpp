// FiniteWatch looks whether the losses and gradients of a run's steps are finite. All ranks get the same answer.
//
// A step is judged by its gradients alone, since a loss that is not finite gives gradients that are not (see step.cpp).
// Averaged gradients are the same on all ranks, and so are the answers. Ranks with their own gradients ask each other.
//
// On a GPU the answer about a step comes to the host while the next step is queued, and is read after that step's
// backward. So the GPU always has work, and every rank reads the answer at the same place. By then the step was taken.
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
  // `update` has the gradients. `ranks_differ` says that ranks step with different gradients.
  FiniteWatch(const TrainOptions& options, const Rank& rank, const Update& update, bool ranks_differ);

  void begin_step(int epoch, int64_t number) {  // `number` counts the epoch's steps from 1
    epoch_ = epoch;
    number_ = number;
  }
  void add_loss(const at::Tensor& mean) { loss_.add_(mean); }  // adds the mean of the rank's part, or of a part of it

  // Call it when a step's gradients are there. With `on_nan` "stop" watch() looks at them; on a GPU it asks, and looks
  // at the answer about the step before. With local SGD it looks when a round ends, where ranks learn of each other.
  void watch();
  void settle();  // looks now at the step that is still open

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
  at::Tensor loss_;           // the sum over the step's parts; the tensor stays in place, so that a graph finds it
  std::optional<Step> open_;  // the step that was not looked at yet
  std::string complaint_;
};

}  // namespace lockstep
