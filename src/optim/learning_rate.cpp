#include <lockstep/base/error.hpp>
#include <lockstep/optim/learning_rate.hpp>

#include "base/number_text.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

namespace lockstep {
namespace {

constexpr double largest_float = std::numeric_limits<float>::max();  // the weights are float

[[noreturn]] void refuse(const char* key, const std::string& what, const std::string& value, const std::string& rule) {
  throw Error(what + " is " + value + "; it must be " + rule, {.options = {key}});
}

double times_the_batch(const LearningRate& rate) {
  return static_cast<double>(rate.batch) / static_cast<double>(rate.reference_batch);
}

double full_rate(const LearningRate& rate) {
  switch (rate.scaling) {
    case LearningRate::Scaling::none:
      return rate.lr;
    case LearningRate::Scaling::sqrt:
      return rate.lr * std::sqrt(times_the_batch(rate));
    case LearningRate::Scaling::linear:
      return rate.lr * times_the_batch(rate);
  }
  throw Error("no LearningRate::Scaling has the number " + std::to_string(static_cast<int>(rate.scaling)));
}

void check_steps(const LearningRate& rate) {
  if (rate.schedule != LearningRate::Schedule::step) {
    if (rate.step_epochs.empty()) return;
    throw Error("epochs of a step schedule are given (`step_epochs`), but the schedule is " +
                    std::string(rate.schedule == LearningRate::Schedule::cosine ? "cosine" : "constant") +
                    "; leave them out, or take `schedule` step",
                {.options = {"step_epochs", "schedule"}});
  }
  if (rate.step_epochs.empty()) {
    throw Error("the step schedule needs the epochs after which the learning rate falls, as in `step_epochs` 30,60,80",
                {.options = {"schedule", "step_epochs"}});
  }
  const auto& epochs = rate.step_epochs;
  const bool ascend = std::adjacent_find(epochs.begin(), epochs.end(), std::greater_equal<>()) == epochs.end();
  if (!ascend || epochs.front() < 1 || epochs.back() >= rate.epochs) {
    throw Error(
        "the epochs of the step schedule must ascend and lie between 0 and the run's " + std::to_string(rate.epochs),
        {.options = {"step_epochs"}});
  }
  if (!(rate.step_factor > 0 && rate.step_factor <= largest_float)) {
    refuse("step_factor", "the factor of the step schedule", number_text(rate.step_factor), "a number above 0");
  }
}

void check_warmup(const LearningRate& rate) {
  const std::string epochs = number_text(rate.warmup_epochs);
  if (!(rate.warmup_epochs >= 0)) refuse("warmup", "the number of epochs of warm-up", epochs, "at least 0");
  if (rate.warmup_epochs > rate.epochs) {
    refuse("warmup", "the number of epochs of warm-up", epochs,
           "at most " + std::to_string(rate.epochs) + ", the run's");
  }
  if (rate.schedule == LearningRate::Schedule::cosine && rate.warmup_epochs == rate.epochs) {
    refuse("warmup", "the number of epochs of warm-up", epochs,
           "below the run's for the cosine schedule, which follows it");
  }
}

}  // namespace

void LearningRate::check() const {
  const LearningRate& rate = *this;
  if (!(rate.lr >= 0 && rate.lr <= largest_float)) {
    refuse("lr", "the learning rate", number_text(rate.lr), "a number from 0 to 3.4e38, the largest float");
  }
  if (rate.batch < 1) refuse("batch_size", "the batch size", std::to_string(rate.batch), "at least 1");
  if (rate.reference_batch < 1)
    refuse("reference_batch", "the reference batch", std::to_string(rate.reference_batch), "at least 1");
  if (rate.epochs < 1) refuse("epochs", "the number of epochs", std::to_string(rate.epochs), "at least 1");
  if (full_rate(rate) > largest_float) {
    refuse("lr", "the learning rate scaled for the batch", number_text(full_rate(rate)),
           "at most 3.4e38, the largest float");
  }
  check_steps(rate);
  check_warmup(rate);
}

double learning_rate_at(const LearningRate& rate, double epochs_done) {
  if (!(epochs_done >= 0 && epochs_done <= rate.epochs)) {
    throw Error("learning_rate_at: asked for the rate after " + number_text(epochs_done) + " epochs of " +
                std::to_string(rate.epochs) +
                "; count epochs and their steps from 0, as in epoch + double(step) / steps_per_epoch, and set "
                "LearningRate::epochs to the run's");
  }
  const double full = full_rate(rate);
  double now = full;
  if (epochs_done < rate.warmup_epochs) {
    const double k = times_the_batch(rate), first = full / (k > 1 ? k : 1000);
    now = first + (full - first) * epochs_done / rate.warmup_epochs;
  } else if (rate.schedule == LearningRate::Schedule::cosine) {
    const double t = (epochs_done - rate.warmup_epochs) / (rate.epochs - rate.warmup_epochs);
    now = full * (1 + std::cos(std::numbers::pi * t)) / 2;
  }
  for (const int epoch : rate.step_epochs) {
    if (epochs_done >= epoch) now *= rate.step_factor;
  }
  return now;
}

}  // namespace lockstep
