#include <lockstep/base/error.hpp>
#include <lockstep/trainer/fit.hpp>

#include "base/number_text.hpp"
#include "data/sizes_text.hpp"
#include "option_pairs.hpp"
#include "train_options.hpp"
#include "workload.hpp"

#include <algorithm>
#include <set>

namespace lockstep {
namespace {

void check_metrics(const Task& task) {
  std::set<std::string> names{"loss", "accuracy"};
  if (task.perplexity) names.insert("perplexity");
  for (const auto& metric : task.metrics) {
    if (metric.name.empty() || !metric.of.function()) {
      throw Error("fit: a metric of \"" + task.name + "\" has no " + (metric.name.empty() ? "name" : "function") +
                      "; give it one",
                  {.options = {"metrics"}});
    }
    if (names.insert(metric.name).second) continue;
    throw Error("fit: a metric of \"" + task.name + "\" is called \"" + metric.name +
                    "\", as another one is, or what fit() measures itself; call it otherwise",
                {.options = {"metrics"}});
  }
  if (task.best_by == "accuracy" && !task.accuracy) {
    throw Error(
        "fit: epochs are compared by the accuracy (Task::best_by), and right answers are not counted; set "
        "Task::accuracy too",
        {.options = {"best_by", "accuracy"}});
  }
  if (!task.best_by.empty() && !names.contains(task.best_by)) {
    throw Error("fit: epochs are compared by \"" + task.best_by +
                    "\" (Task::best_by), and no metric is called so; take the name of one, \"loss\" or \"accuracy\"",
                {.options = {"best_by"}});
  }
  if (task.test.size() > 0 || (task.metrics.empty() && task.best_by.empty() && task.patience == 0)) return;
  throw Error("fit: metrics, best_by and patience are of the test samples, and \"" + task.name +
                  "\" has none; give Task::test, or leave them out",
              {.options = {"test"}});
}

void check_samples(const Samples& samples, const std::string& what, const TrainOptions& options) {
  if (!samples.in_memory()) return;
  const at::Tensor &x = samples.tensors().x, &y = samples.tensors().y;
  if (x.size(0) != (y.defined() && y.dim() > 0 ? y.size(0) : 0)) {
    throw Error("fit: x of the " + what + " samples has " + std::to_string(x.size(0)) + " rows, and y another number");
  }
  for (const auto& [name, tensor] : samples.tensors().more) {
    if (tensor.defined() && tensor.dim() > 0 && tensor.size(0) == x.size(0)) continue;
    throw Error("fit: x of the " + what + " samples has " + std::to_string(x.size(0)) + " rows, and \"" + name +
                "\" is " + sizes_text(tensor) + "; it must have a row for each sample");
  }
  if (options.memory_format == MemoryFormat::channels_last && x.dim() != 4) {
    throw Error("fit: `memory_format` channels-last is for images [n, channels, height, width], and x of the " + what +
                    " samples has " + std::to_string(x.dim()) + " dimensions; leave it out",
                {.options = {"memory_format"}});
  }
}

void check_update(const Task& task, const TrainOptions& options) {
  if (!(task.ema_decay >= 0 && task.ema_decay < 1)) {
    throw Error("fit: the ema_decay of \"" + task.name + "\" is " + number_text(task.ema_decay) +
                    "; it must be from 0, for no average, to below 1, such as 0.999",
                {.options = {"ema_decay"}});
  }
  if (task.groups && !task.optimizer) {
    throw Error(
        "fit: \"" + task.name +
            "\" has groups of parameters (Task::groups), and no optimizer of its own that says what each of them "
            "gets; give Task::optimizer too, or leave the groups out",
        {.options = {"groups"}});
  }
  check_pairs({.options = options, .task = &task});
}

void check_task(const Task& task, const TrainOptions& options) {
  const auto names = model_names();
  if (task.name.empty() || std::find(names.begin(), names.end(), task.name) != names.end()) {
    throw Error("fit: the task is called \"" + task.name +
                    "\"; a name tells its network from others, and must not be that of one of lockstep's models",
                {.options = {"name"}});
  }
  if (to_string(options.model) != to_string(ModelOptions()) || options.data != TrainOptions().data) {
    throw Error("fit: `model` and `data` are options of lockstep's own models; \"" + task.name +
                    "\" brings its network and its data, so leave them out",
                {.options = {"model", "data"}});
  }
  if (task.patience < 0) {
    throw Error("fit: the patience is " + std::to_string(task.patience) +
                    " epochs; it must be at least 1, or 0 for no early stop",
                {.options = {"patience"}});
  }
  if (task.train.size() == 0)
    throw Error("fit: \"" + task.name + "\" has no training samples; give Task::train", {.options = {"train"}});
  check_samples(task.train, "training", options);
  if (task.test.size() > 0) check_samples(task.test, "test", options);
  check_metrics(task);
  check_update(task, options);
}

Workload workload_of_task(const Task& task) {
  Workload workload{.task = task, .digests = digests_of(task.train, task.test)};
  if (workload.task.source.empty()) workload.task.source = "the data of " + task.name;
  workload.announcement = workload.task.source;
  workload.title = task.source.empty() ? task.name : task.name + " on " + task.source;
  return workload;
}

}  // namespace

TrainResult fit(const Task& task, const TrainOptions& options, const TrainCallbacks& callbacks) {
  check_task(task, options);
  TrainOptions settings = options;
  settings.model.name = task.name;
  settings = checked_for_fit(settings);
  return run_workload(settings, callbacks, [&] { return workload_of_task(task); });
}

}  // namespace lockstep
