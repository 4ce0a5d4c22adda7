// RateOptions: the learning rate of a run as its user sets it, and the names of its parts.
//
// A plain value and pure functions. Thread-safe.
#pragma once

#include <lockstep/optim/learning_rate.hpp>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

// Names: "none", "sqrt", "linear"; "constant", "step", "cosine". The last two functions convert back, and throw Error,
// which lists the names, for any other text.
std::string_view to_string(LearningRate::Scaling scaling);
std::string_view to_string(LearningRate::Schedule schedule);
LearningRate::Scaling scaling_from(std::string_view name);
LearningRate::Schedule lr_schedule_from(std::string_view name);

// The part of a LearningRate that a user sets. The run adds its batch and its epochs.
struct RateOptions {
  std::optional<double> lr = {};  // the rate for reference_batch samples; none: the optimizer's default_learning_rate
  int64_t reference_batch = 0;    // a number of samples; 0: the run's batch before it is scaled
  LearningRate::Scaling scaling = LearningRate::Scaling::none;
  double warmup_epochs = 0;
  LearningRate::Schedule schedule = LearningRate::Schedule::constant;
  std::vector<int> step_epochs = {};
  double step_factor = 0.1;
};

// Describes the rate: "0.2"; "0.2, linear for 2048 / 256 samples = 1.6, from 0.2 over 5 epochs of warm-up, cosine".
std::string to_string(const LearningRate& rate);

}  // namespace lockstep
