// Learning rates: compute how the learning rate depends on the size of the batch, and how it changes over a run.
//
//   lockstep::LearningRate rate{.lr = 0.1, .batch = 8192, .reference_batch = 256,
//                               .scaling = lockstep::LrScaling::linear, .warmup_epochs = 5,
//                               .schedule = lockstep::LrSchedule::cosine, .epochs = 90};
//   const double epochs_done = epoch + static_cast<double>(step) / steps_per_epoch;  // both from 0
//   lockstep::set_learning_rate(sgd, lockstep::learning_rate_at(rate, epochs_done));  // before each step()
//
// A plain value and pure functions without LibTorch (optimizers.hpp has set_learning_rate). Thread-safe. The formulas
// below have their sources beside them; tests compare the code with the formulas.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

// The learning rate for k times the reference batch. none: the same. sqrt: sqrt(k) times as large, which keeps the
// variance of the gradient noise (Krizhevsky 2014). linear: k times as large, since one step does the work of k small
// ones (Goyal et al. 2017, section 2.1).
enum class LrScaling { none, sqrt, linear };

enum class LrSchedule {
  constant,
  step,    // times step_factor from each epoch of step_epochs on (Goyal et al. 2017, section 5.1: 0.1 at 30, 60, 80)
  cosine,  // times (1 + cos(pi t)) / 2, t from 0 after the warm-up to 1 at the end (Loshchilov & Hutter 2017, equation
           // 5, one period down to 0; He et al. 2019, section 3.1, count it from the end of the warm-up too)
};

// Names: "none", "sqrt", "linear"; "constant", "step", "cosine". The last two functions convert back, and throw Error,
// which lists the names, for any other text.
std::string_view to_string(LrScaling scaling);
std::string_view to_string(LrSchedule schedule);
LrScaling scaling_from(std::string_view name);
LrSchedule lr_schedule_from(std::string_view name);

// The part of a LearningRate that a user sets. The run adds its batch and its epochs.
struct RateOptions {
  std::optional<double> lr = {};  // the rate for reference_batch samples; none: the optimizer's default_learning_rate
  int64_t reference_batch = 0;    // a number of samples; 0: the run's batch before it is scaled
  LrScaling scaling = LrScaling::none;
  double warmup_epochs = 0;
  LrSchedule schedule = LrSchedule::constant;
  std::vector<int> step_epochs = {};
  double step_factor = 0.1;
};

struct LearningRate {
  double lr = 0.2;                // the rate for batches of reference_batch samples
  int64_t batch = 256;            // the number of samples of the global batch
  int64_t reference_batch = 256;  // a number of samples; k = batch / reference_batch
  LrScaling scaling = LrScaling::none;
  // Warm-up (Goyal et al. 2017, section 2.2): in the first epochs the rate grows by the same amount at every step, from
  // 1/k of the full rate to the full rate. With linear scaling it begins at lr. If k is not above 1, it begins at
  // 1/1000 of the full rate. 0: no warm-up.
  double warmup_epochs = 0;
  LrSchedule schedule = LrSchedule::constant;
  std::vector<int> step_epochs = {};  // for LrSchedule::step: the rate steps after these numbers of epochs; ascending
  double step_factor = 0.1;           // for LrSchedule::step; above 0
  int epochs = 10;                    // the number of epochs of the whole run

  bool operator==(const LearningRate&) const = default;
};

// Throws Error, which says what would do: a value is out of its range; the warm-up is longer than the run, or with
// cosine as long; step epochs without the step schedule, or that schedule without step epochs; no float can hold the
// scaled rate.
void check_learning_rate(const LearningRate& rate);

// The learning rate after `epochs_done` epochs: 0 at epoch 1's first step, (i - 1) / n at its i-th step of n. A plain
// constant rate gives exactly lr. `rate` must pass check_learning_rate. Throws Error unless 0 <= epochs_done <= epochs.
double learning_rate_at(const LearningRate& rate, double epochs_done);

// Describes the rate: "0.2"; "0.2, linear for 2048 / 256 samples = 1.6, from 0.2 over 5 epochs of warm-up, cosine".
std::string to_string(const LearningRate& rate);

}  // namespace lockstep
