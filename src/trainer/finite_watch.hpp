// FiniteWatch: looks whether the losses and gradients of a run's steps are finite. All ranks get the same answer.
//
// A step is judged by its gradients alone, since a loss that is not finite makes them so (see step.cpp). Averaged
// gradients are the same on all ranks, and so is what follows from them. Ranks that step with others ask each other.
#pragma once

#include <lockstep/trainer/train_options.hpp>

#include "update.hpp"

#include <cstdint>
#include <optional>
#include <string>

namespace lockstep {

class FiniteWatch {
 public:
  // `update` has the gradients. `ranks_differ`: in those that they step with.
  FiniteWatch(const TrainOptions& options, const Rank& rank, const Update& update, bool ranks_differ);

  void begin_step(int epoch, int64_t number);  // in the epoch, from 1
  void add_loss(const at::Tensor& mean);       // of this rank's batch, or of a part of it

  // A step's gradients are there. With `on_nan` "stop" it looks at them, or asks later: a GPU is not waited for, and
  // with local SGD ranks learn of each other when a round ends.
  void watch();
  void settle();  // asks now what has not been asked yet

  // Looks at the step's gradients now. What is not finite, in words; empty if nothing is. All ranks must ask.
  std::string judge();

  // The run cannot go on; why, or empty.
  void give_up(const std::string& why) { complaint_ = why; }
  const std::string& complaint() const { return complaint_; }

 private:
  struct Step {  // whose loss and gradients may not be finite
    int64_t number = 0;
    at::Tensor sum;   // of its gradients, finite if they are
    at::Tensor loss;  // of this rank's part
  };
  Step take_step();
  std::string what_is_not_finite(const Step& step);

  const OnNan on_nan_;
  const int64_t round_;  // steps of a round of local SGD; 0: ranks average gradients
  Rank rank_;
  const Update& update_;
  const bool ranks_differ_;
  int epoch_ = 0;
  int64_t number_ = 0;
  at::Tensor loss_;  // the sum over the step's parts; in its place, so that a graph finds it
  std::optional<Step> not_asked_;
  std::string complaint_;
};

}  // namespace lockstep
