#include <lockstep/trainer/train_options.hpp>

#include "base/number_text.hpp"
#include "option_names.hpp"

namespace lockstep {
namespace {

// Gives the rate after the warm-up, before any schedule.
double full_rate(LearningRate rate) {
  rate.warmup_epochs = 0;
  rate.schedule = LearningRate::Schedule::constant;
  rate.step_epochs.clear();
  return learning_rate_at(rate, 0);
}

}  // namespace

std::string to_string(const LearningRate& rate) {
  std::string text = number_text(rate.lr);
  const double full = full_rate(rate);
  if (rate.scaling != LearningRate::Scaling::none) {
    text += ", " + std::string(to_string(rate.scaling)) + " for " + std::to_string(rate.batch) + " / " +
            std::to_string(rate.reference_batch) + " samples = " + number_text(full);
  }
  if (rate.warmup_epochs > 0) {
    text += ", from " + number_text(learning_rate_at(rate, 0)) + " over " + number_text(rate.warmup_epochs) +
            (rate.warmup_epochs == 1 ? " epoch" : " epochs") + " of warm-up";
  }
  if (rate.schedule == LearningRate::Schedule::cosine) text += ", cosine";
  for (const int epoch : rate.step_epochs) {
    text += (epoch == rate.step_epochs.front() ? ", times " + number_text(rate.step_factor) + " after epochs " : ", ") +
            std::to_string(epoch);
  }
  return text;
}

}  // namespace lockstep
