// Learning rates: compute the learning rate from the size of the batch, and its changes over a run.
//
//   lockstep::LearningRate rate{.lr = 0.1, .batch = 8192, .reference_batch = 256,
//                               .scaling = lockstep::LearningRate::Scaling::linear, .warmup_epochs = 5,
//                               .schedule = lockstep::LearningRate::Schedule::cosine, .epochs = 90};
//   const double epochs_done = epoch + static_cast<double>(step) / steps_per_epoch;  // both from 0
//   adam.set_lr(lockstep::learning_rate_at(rate, epochs_done));  // an Optimizer, before each step()
//
// The header has a plain value and pure functions, without LibTorch. Thread-safe. The formulas below name their
// sources; tests compare the code with the formulas.
#pragma once

#include <cstdint>
#include <vector>

namespace lockstep {

struct LearningRate {
  // Says how the learning rate grows for k times the reference batch. none: it stays. sqrt: it is sqrt(k) times as
  // large, which keeps the variance of the gradient noise (Krizhevsky 2014). linear: it is k times as large, since one
  // step has the work of k small ones (Goyal et al. 2017, section 2.1).
  enum class Scaling { none, sqrt, linear };

  enum class Schedule {
    constant,
    step,    // times step_factor from each epoch of step_epochs on (Goyal et al. 2017, section 5.1: 0.1 at 30, 60, 80)
    cosine,  // times (1 + cos(pi t)) / 2, t from 0 after the warm-up to 1 at the end (Loshchilov & Hutter 2017,
             // equation 5, one period down to 0; He et al. 2019, section 3.1, count it from the end of the warm-up too)
  };

  double lr = 0.2;                // the rate for batches of reference_batch samples
  int64_t batch = 256;            // the number of samples of the global batch
  int64_t reference_batch = 256;  // a number of samples; k = batch / reference_batch
  Scaling scaling = Scaling::none;
  // Warm-up (Goyal et al. 2017, section 2.2): in the first epochs the rate grows by the same amount at every step, from
  // 1/k of the full rate to the full rate. With linear scaling it begins at lr. If k is not above 1, it begins at
  // 1/1000 of the full rate. 0: no warm-up.
  double warmup_epochs = 0;
  Schedule schedule = Schedule::constant;
  std::vector<int> step_epochs = {};  // for Schedule::step: the rate steps after these numbers of epochs; ascending
  double step_factor = 0.1;           // for Schedule::step; above 0
  int epochs = 10;                    // the number of epochs of the whole run

  // Throws Error, which says what is allowed: a value is out of its range; the warm-up is longer than the run, or with
  // cosine as long; step epochs without the step schedule, or that schedule without step epochs; no float can hold the
  // scaled rate.
  void check() const;

  bool operator==(const LearningRate&) const = default;
};

// Gives the rate after `epochs_done` epochs. That is 0 at epoch 1's first step, and (i - 1) / n at its i-th step of n.
// A plain constant rate gives exactly lr. Give a `rate` that passes check(). Throws Error unless epochs_done is from 0
// to epochs.
double learning_rate_at(const LearningRate& rate, double epochs_done);

using LrScaling [[deprecated("lockstep::LearningRate::Scaling")]] = LearningRate::Scaling;
using LrSchedule [[deprecated("lockstep::LearningRate::Schedule")]] = LearningRate::Schedule;
[[deprecated("lockstep::LearningRate::check")]] inline void check_learning_rate(const LearningRate& rate) {
  rate.check();
}

}  // namespace lockstep
