#include "measures.hpp"

#include <c10/core/GradMode.h>
#include <lockstep/base/error.hpp>

#include "base/number_text.hpp"
#include "base/rank_thread.hpp"
#include "data/sizes_text.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace lockstep {
namespace {

std::string what_it_gave(const at::Tensor& tensor) {
  return tensor.defined() ? "a tensor " + sizes_text(tensor) : "an undefined tensor";
}

at::Tensor checked_number(const at::Tensor& loss, const Task& task, const Rank& rank) {
  if (loss.defined() && loss.numel() == 1 && loss.is_floating_point()) return loss.dim() == 0 ? loss : loss.reshape({});
  throw Error(rank.name() + ": the criterion of \"" + task.name + "\" gave " + what_it_gave(loss) +
                  (loss.defined() ? std::string(" of type ") + c10::toString(loss.scalar_type()) : "") +
                  "; it must give the mean loss of the samples, one number; take its mean",
              {.options = {"criterion"}});
}

// Gives a score: larger is better, and a measure without a value is worse than any.
double score_of(const EpochMetrics& metrics, const Judge& judge) {
  double value = metrics.test_accuracy;
  if (judge.measure != "accuracy") {
    const auto found = metrics.test.find(judge.measure);
    value = found == metrics.test.end() ? std::numeric_limits<double>::quiet_NaN() : found->second;
  }
  if (std::isnan(value)) return -std::numeric_limits<double>::infinity();
  return judge.more_is_better ? value : -value;
}

}  // namespace

at::Tensor right_answers(const at::Tensor& y_hat, const at::Tensor& y) {
  const c10::NoGradGuard no_grad;
  if (y_hat.dim() == 2 && y.dim() == 1) return y_hat.argmax(1) == y;
  throw Error("right answers are counted (Task::accuracy) where y_hat is [n, classes] and y [n], and here y_hat is " +
                  what_it_gave(y_hat) + " and y " + what_it_gave(y) +
                  "; leave Task::accuracy out, and count in a metric of your own",
              {.options = {"accuracy"}});
}

at::Tensor checked_loss(const Task& task, const Rank& rank, const at::Tensor& y_hat, const Batch& batch) {
  const at::Tensor loss = [&] {
    const InUserCode here("the criterion of \"" + task.name + "\"");
    return task.criterion(y_hat, batch);
  }();
  return checked_number(loss, task, rank);
}

std::vector<Measure> measures_of(const Task& task) {
  std::vector<Measure> measures{{"the criterion of \"" + task.name + "\"", "criterion", task.criterion}};
  for (const auto& metric : task.metrics)
    measures.push_back({"the metric \"" + metric.name + "\"", "metrics", metric.of});
  if (task.accuracy) {
    const auto right = [](const at::Tensor& y_hat, const at::Tensor& y) { return right_answers(y_hat, y); };
    measures.push_back({"accuracy", "accuracy", right});
  }
  return measures;
}

void put_measures(const std::vector<double>& means, const Task& task, EpochMetrics& metrics) {
  auto mean = means.begin();
  metrics.test["loss"] = *mean++;
  for (const auto& metric : task.metrics) metrics.test[metric.name] = *mean++;
  if (task.perplexity) metrics.test["perplexity"] = std::exp(metrics.test["loss"]);
  if (task.accuracy) metrics.test_accuracy = *mean;
}

std::string measures_text(const Task& task) {
  std::string text;
  for (const auto& metric : task.metrics) text += ", metric " + metric.name;
  if (!task.best_by.empty()) text += ", best by " + task.best_by;
  if (task.patience > 0) text += ", patience " + std::to_string(task.patience);
  if (task.optimizer) text += ", an optimizer of its own";
  if (task.groups) text += ", groups of its own";
  if (task.ema_decay > 0) text += ", ema_decay " + number_text(task.ema_decay);
  if (task.before_step) text += ", a before_step";
  return text;
}

Judge judge_of(const Task& task) {
  const std::string measure = !task.best_by.empty() ? task.best_by : task.accuracy ? "accuracy" : "loss";
  if (measure == "accuracy") return {};
  for (const auto& metric : task.metrics) {
    if (metric.name == measure) return {.measure = measure, .more_is_better = metric.more_is_better};
  }
  return {.measure = measure, .more_is_better = false};
}

int best_epoch(const std::vector<EpochMetrics>& history, const Judge& judge) {
  int best = 0;
  double best_score = -std::numeric_limits<double>::infinity();
  for (const auto& metrics : history) {
    const double score = score_of(metrics, judge);
    if (!(score > best_score)) continue;
    best = metrics.epoch;
    best_score = score;
  }
  return best;
}

std::string remark_on_no_value(const std::vector<EpochMetrics>& history, const Judge& judge, int patience) {
  const auto has_none = [&](const EpochMetrics& metrics) { return best_epoch({metrics}, judge) == 0; };
  if (!has_none(history.back()) || std::count_if(history.begin(), history.end(), has_none) > 1) return "";
  return "epoch " + std::to_string(history.back().epoch) + ": the test samples' " + judge.measure +
         ", by which epochs are compared, is no finite number. Such an epoch is never the best one" +
         (patience > 0
              ? ", and the run ends after " + std::to_string(patience) + " epochs without a better one (Task::patience)"
              : "") +
         ". Look at the metric, the test samples and the learning rate";
}

bool is_enough(const std::vector<EpochMetrics>& history, const Judge& judge, int patience) {
  return patience > 0 && static_cast<int>(history.size()) - best_epoch(history, judge) >= patience;
}

}  // namespace lockstep
