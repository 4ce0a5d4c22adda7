#include <lockstep/base/error.hpp>
#include <lockstep/trainer/trainer.hpp>

#include "base/libtorch_log.hpp"
#include "base/rank_thread.hpp"
#include "common_settings.hpp"
#include "devices/gpu_math.hpp"
#include "devices/processor_kind.hpp"
#include "elastic_run.hpp"
#include "kept_run.hpp"
#include "measures.hpp"
#include "resume.hpp"
#include "run_notes.hpp"
#include "run_of_rank.hpp"
#include "survive/elastic_job.hpp"
#include "trace.hpp"
#include "train_options.hpp"
#include "workload.hpp"

#include <functional>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <string>
#include <utility>

namespace lockstep {
namespace {

// Warns as run() does where no callback is given.
void warn_by_libtorch(const std::string& text) {
  warn_as_libtorch("lockstep: " + text);
}

// Rank 0 reports, and any rank may warn, each on its own thread. Under a launcher one process reports. In an elastic
// job any process may become that one, so all have callbacks.
TrainCallbacks one_at_a_time(const TrainCallbacks& callbacks, std::mutex& mutex, RunNotes& notes) {
  const bool elastic = ElasticJob::is_asked_for();
  const auto guarded = [&mutex, elastic]<class... Arguments>(const std::function<void(Arguments...)>& callback,
                                                             const std::string& name) {
    if (!callback) return callback;
    return std::function<void(Arguments...)>([&mutex, elastic, callback, name](Arguments... arguments) {
      if (elastic && this_process().index != 0) return;
      const std::lock_guard lock(mutex);
      const InUserCode here("TrainCallbacks::" + name);
      callback(arguments...);
    });
  };
  const Warn warn = [&notes, callback = callbacks.on_warning ? callbacks.on_warning
                                                             : Warn(warn_by_libtorch)](const std::string& text) {
    notes.warn(text);
    callback(text);
  };
  return {.on_data = guarded(callbacks.on_data, "on_data"),
          .on_step = guarded(callbacks.on_step, "on_step"),
          .on_epoch = guarded(callbacks.on_epoch, "on_epoch"),
          .on_warning = guarded(warn, "on_warning"),
          .stop = callbacks.stop};
}

// A Run is a run in this process, around its ranks.
class Run {
 public:
  // Opens the files and data of the run, in the order in which mistakes are to be told.
  Run(const TrainOptions& given, const TrainCallbacks& callers, const std::function<Workload()>& load)
      : callbacks_(one_at_a_time(callers, mutex_, notes_)),
        settings_(with_resume_found(given, callbacks_.on_warning)),
        elastic_(ElasticRun::of(settings_, callbacks_, kept_)),
        resumed_(resumed_state(settings_, callbacks_.on_warning)),
        kept_(settings_, callbacks_, notes_),
        workload_(load()) {
    result_.devices = settings_.devices;
    if (resumed_) result_.history = resumed_->history;
    const Task& task = workload_.task;
    check_batch_size(settings_, task.train.size(), task.source);
    if (resumed_) check_fits(*resumed_, settings_, task.train.size(), task.source, workload_.digests);
  }

  TrainResult train() {
    result_.stopped = callbacks_.stop.stop_requested();
    if (result_.stopped) return result_;
    begin();
    if (train_ranks()) finish();
    return result_;
  }

 private:
  void begin() {
    if (!settings_.keep.trace.empty())
      trace_.emplace(trace_file(settings_.keep.trace, this_process().index), settings_.devices);
    kept_.create(workload_);
    if (callbacks_.on_data) callbacks_.on_data(workload_.announcement);
    if (!workload_.warning.empty()) callbacks_.on_warning(workload_.warning);
  }

  // Gives false if the job was done before this process could join it.
  bool train_ranks() {
    const RunOptions options = run_options();
    if (elastic_) elastic_->resume(std::exchange(resumed_, std::nullopt));
    SharedRun shared{.settings = settings_,
                     .callbacks = callbacks_,
                     .workload = workload_,
                     .resumed = resumed_,
                     .kept = kept_,
                     .elastic = elastic_.get(),
                     .trace = trace_ ? &*trace_ : nullptr,
                     .processor = keeps_checkpoints(settings_) ? processor_kind(settings_.devices[0]) : "",
                     .result = result_};
    const GpuMath math(
        {.tf32 = settings_.precision == Precision::tf32, .reproducible = settings_.batch.grain.has_value()});
    try {
      run(
          settings_.devices, [&](Rank& rank) { RunOfRank(shared, rank).train(); }, options);
    } catch (const Stopped&) {
      result_.stopped = true;
    }
    not_finite_ = shared.not_finite;
    return !elastic_ || elastic_->is_done() || result_.stopped;
  }

  RunOptions run_options() const {
    RunOptions options{
        .threads_per_rank = settings_.threads_per_rank,
        .timeout = settings_.timeout,
        .stop = callbacks_.stop,
        .silence = settings_.silence,
        // In an elastic job a state may come from another rank.
        .configuration = common_settings(settings_, workload_.digests, resumed_ && !elastic_ ? &*resumed_ : nullptr) +
                         measures_text(workload_.task),
        .seed = settings_.seed,
        .on_warning = callbacks_.on_warning};
    if (elastic_) options.succession = [this](const Devices&, const RunOptions&) { return elastic_; };
    return options;
  }

  void finish() {
    notes_.set("straggler", result_.straggler);
    notes_.set("end", result_.stopped ? "stopped by request" : not_finite_);
    if (trace_ && trace_->written()) notes_.set("timeline", trace_->step());
    kept_.finish(result_.history);
    if (!not_finite_.empty()) throw Error(not_finite_, {Error::not_finite});
    if (trace_ && !trace_->written() && !result_.stopped) {
      callbacks_.on_warning(settings_.keep.trace.string() + " has no timeline: the run had no more than " +
                            std::to_string(kTraceAfterSteps) + " steps, which are not traced");
    }
  }

  std::mutex mutex_;
  RunNotes notes_;
  const TrainCallbacks callbacks_;
  const TrainOptions settings_;
  const std::shared_ptr<ElasticRun> elastic_;  // null: the job is not elastic
  std::optional<RunState> resumed_;
  KeptRun kept_;
  const Workload workload_;
  std::optional<Trace> trace_;
  TrainResult result_;
  std::string not_finite_;  // why the run ended, if it was not finite
};

}  // namespace

double TrainResult::seconds_per_epoch() const {
  if (history.empty()) return 0;
  const auto add = [](double sum, const EpochMetrics& metrics) { return sum + metrics.seconds; };
  return std::accumulate(history.begin(), history.end(), 0.0, add) / static_cast<double>(history.size());
}

double TrainResult::data_wait() const {
  double waited = 0, all = 0;
  for (const auto& metrics : history) {
    waited += metrics.data_wait * metrics.seconds;
    all += metrics.seconds;
  }
  return all == 0 ? 0 : waited / all;
}

TrainResult run_workload(const TrainOptions& settings, const TrainCallbacks& callbacks,
                         const std::function<Workload()>& load) {
  return Run(settings, callbacks, load).train();
}

}  // namespace lockstep
