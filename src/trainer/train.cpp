#include <lockstep/base/error.hpp>
#include <lockstep/models/weights.hpp>
#include <lockstep/trainer/trainer.hpp>

#include "base/libtorch_log.hpp"
#include "base/rank_thread.hpp"
#include "base/seconds.hpp"
#include "batch_settings.hpp"
#include "checkpoint_folder.hpp"
#include "comm/failure.hpp"
#include "common_settings.hpp"
#include "data_parallel/replica_check.hpp"
#include "devices/gpu_math.hpp"
#include "devices/processor_kind.hpp"
#include "elastic.hpp"
#include "measures.hpp"
#include "rank_trainer.hpp"
#include "ranks/elastic_job.hpp"
#include "resume.hpp"
#include "run_folder.hpp"
#include "take_over.hpp"
#include "tensorboard_log.hpp"
#include "trace.hpp"
#include "train_options.hpp"
#include "workload.hpp"

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <functional>
#include <mutex>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace lockstep {
namespace {

namespace fs = std::filesystem;
using namespace std::chrono_literals;

constexpr int kMostMended = 10;  // replicas; memory that fails so often is no chance

bool goes_on_in_its_folder(const TrainOptions& options) {
  if (options.keep.resume.empty() || options.keep.run_dir.empty()) return false;
  std::error_code different;
  return std::filesystem::equivalent(run_to_go_on(options.keep.resume), options.keep.run_dir, different);
}

// As run() does, where nobody wants to be told.
void warn_by_libtorch(const std::string& text) {
  warn_as_libtorch("lockstep: " + text);
}

// Rank 0 reports on its thread, and any rank may warn on its own. Under a launcher one process reports. In an elastic
// job this may be any of them, and so all have callbacks.
TrainCallbacks one_at_a_time(const TrainCallbacks& callbacks, std::mutex& mutex) {
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
  return {.on_data = guarded(callbacks.on_data, "on_data"),
          .on_step = guarded(callbacks.on_step, "on_step"),
          .on_epoch = guarded(callbacks.on_epoch, "on_epoch"),
          .on_warning = guarded(callbacks.on_warning ? callbacks.on_warning : Warn(warn_by_libtorch), "on_warning"),
          .stop = callbacks.stop};
}

// What a process knows of the generation that trains (see ranks/elastic_job.hpp). Without an elastic job there is one.
struct Succession {
  bool writes;                         // this process keeps the run
  bool met = false;                    // it has trained with others, so a run of this job is in the folder
  bool is_last = false;                // its training is done
  int kept_epochs = 0;                 // epochs whose files and checkpoint this process has written
  int told_epochs = 0;                 // and those that have been reported
  bool ended_by_difference = false;    // replicas were not equal, and it is known whose are right
  int mended = 0;                      // how often that was so
  std::optional<RunState> state = {};  // which the next one goes on from
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

TrainResult run_workload(const TrainOptions& given, const TrainCallbacks& callers,
                         const std::function<Workload()>& load) {
  std::mutex mutex;
  const TrainCallbacks callbacks = one_at_a_time(callers, mutex);
  const TrainOptions settings = with_resume_found(given, callbacks.on_warning);
  std::optional<ElasticJob> elastic;
  if (ElasticJob::is_asked_for()) {
    check_elastic(settings);
    const fs::path& run = settings.keep.run_dir;
    elastic.emplace(callbacks.stop, settings.silence,
                    run.empty() ? "" : (fs::absolute(run) / kCheckpointFolder).string());
  }
  std::optional<RunState> resumed = resumed_state(settings, callbacks.on_warning);
  std::optional<RunFolder> folder;
  folder.emplace(this_process().index == 0 ? settings.keep.run_dir : "",  // one process writes
                 goes_on_in_its_folder(settings));
  TrainResult result;
  result.devices = settings.devices;
  if (resumed) result.history = resumed->history;
  const Workload workload = load();
  const Task& task = workload.task;
  check_batch_size(settings, task.train.size(), task.source);
  if (resumed) check_fits(*resumed, settings, task.train.size(), task.source, workload.digests);
  if (callbacks.stop.stop_requested()) {
    result.stopped = true;
    return result;
  }
  std::optional<Trace> trace;
  if (!settings.keep.trace.empty())
    trace.emplace(trace_file(settings.keep.trace, this_process().index), settings.devices);
  const Judge judge = judge_of(task);
  folder->create(settings, judge, callbacks.on_warning);
  if (callbacks.on_data) callbacks.on_data(workload.announcement);
  if (!workload.warning.empty()) callbacks.on_warning(workload.warning);
  const std::string title =
      workload.title + ", " + to_string(settings.devices) + ", batch size " + std::to_string(settings.batch.global());

  std::optional<TensorBoardLog> board;
  if (settings.keep.tensorboard && !settings.keep.run_dir.empty()) board.emplace(settings.keep.run_dir);
  std::string not_finite;  // why the run ends, if so
  const std::string processor = keeps_checkpoints(settings) ? processor_kind(settings.devices[0]) : "";
  Succession succession{.writes = this_process().index == 0};
  const auto body = [&](Rank& rank) {
    const bool is_first_here = rank.index_in_process() == 0;
    std::optional<RunState> begin = resumed;  // they share the tensors
    const bool may_mend = elastic && succession.mended < kMostMended;
    if (elastic) {
      if (is_first_here) succession.met = true;
      hand_over(begin, rank);
      if (rank.index() == 0) elastic->note_beginning();
      if (is_first_here) result.history = begin ? begin->history : std::vector<EpochMetrics>();
    }
    RankTrainer trainer(settings, callbacks, task, rank, trace ? &*trace : nullptr,
                        std::holds_alternative<Recorded>(settings.way) ? make_cuda_graph() : nullptr,
                        begin ? &*begin : nullptr);
    if (elastic) trainer.be_elastic(elastic->newer());
    const auto complete = [&](RunState state) {
      state.epochs = static_cast<int>(result.history.size());
      state.history = result.history;
      state.config = to_json(settings);
      state.data = workload.digests;
      state.processor = processor;
      return state;
    };
    const auto keep_state = [&] {
      RunState state = trainer.state();
      if (rank.index() == 0) folder->keep(complete(std::move(state)));
    };
    const std::function<void()> keep = keeps_checkpoints(settings) ? keep_state : std::function<void()>();
    const auto keep_epoch = [&](const EpochMetrics& metrics, const torch::nn::Module& net) {
      if (rank.index() == 0) folder->write(result.history, net, title, callbacks.on_warning);
      if (rank.index() == 0 && board)
        board->write(metrics, metrics.lr, samples_of_epoch(settings.batch, task.train.size()), trainer.waits());
      if (keep) keep();
      if (rank.index() != 0) return;
      succession.kept_epochs = metrics.epoch;
      if (callbacks.on_epoch && std::exchange(succession.told_epochs, metrics.epoch) < metrics.epoch)
        callbacks.on_epoch(metrics);
    };
    // Whoever wrote may be gone between an epoch's evaluation and its files.
    const auto keep_what_is_owed = [&] {
      const bool between_epochs = begin && begin->steps == 0 && !begin->history.empty();
      if (elastic->generation() == 0 || !between_epochs) return;  // as on all ranks
      if (!rank.any(rank.index() == 0 && succession.kept_epochs < begin->epochs)) return;
      trainer.show();
      keep_epoch(begin->history.back(), *trainer.whole());
    };
    const auto train_epochs = [&] {
      auto history = begin ? begin->history : std::vector<EpochMetrics>();  // this rank's own
      for (int number = begin ? begin->epochs + 1 : 1; number <= settings.epochs; ++number) {
        if (is_enough(history, judge, task.patience)) break;
        EpochMetrics metrics = trainer.epoch(number, keep);
        if (trainer.regroups()) return;
        synchronize(rank.device());  // what is read below, other ranks may have written
        if (!trainer.not_finite().empty()) {
          if (is_first_here) not_finite = trainer.not_finite();
          break;
        }
        const auto net = trainer.whole();
        if (is_first_here) {
          metrics.weights = weights_hash(*net);
          result.history.push_back(metrics);
        }
        history.push_back(metrics);
        const std::string remark = task.test.size() > 0 ? remark_on_no_value(history, judge, task.patience) : "";
        if (rank.index() == 0 && !remark.empty()) callbacks.on_warning(remark);
        keep_epoch(metrics, *net);
      }
      if (is_first_here) result.straggler = trainer.straggler();
      if (is_first_here) succession.is_last = true;
    };
    const auto leave_state = [&] {
      if (elastic && is_first_here) succession.state = complete(trainer.whole_steps());
    };
    // All ranks throw it in the same call. One whose replica is wrong drops its state, and gets the others' when the
    // next generation begins.
    const auto mend = [&](const ReplicasDiffer& difference) {
      const auto& wrong = difference.ranks();
      if (rank.index() == 0)
        callbacks.on_warning(std::string(difference.what()) + ". The others go on, and give it their state");
      if (!is_first_here) return;
      ++succession.mended;
      succession.ended_by_difference = true;
      if (std::find(wrong.begin(), wrong.end(), rank.index()) == wrong.end()) return leave_state();
      succession.state = std::nullopt;
      resumed = std::nullopt;
    };
    try {
      if (elastic) keep_what_is_owed();
      train_epochs();
    } catch (const ReplicasDiffer& difference) {
      if (!may_mend || difference.ranks().empty()) throw;
      return mend(difference);
    } catch (...) {
      leave_state();
      throw;
    }
    leave_state();
    if (trace) trace->end(rank);
  };
  // Batches have one shape, but for the last of an epoch. Trials of cuDNN's algorithms may end otherwise each time, so
  // with a grain there are none.
  const bool same_bits = settings.batch.grain != 0;
  const GpuMath math({.tf32 = settings.precision == Precision::tf32,
                      .fixed_shapes = settings.devices[0].is_cuda() && !same_bits,
                      .reproducible = same_bits});
  const RunOptions run_options{
      .threads_per_rank = settings.threads_per_rank,
      .timeout = settings.timeout,
      // One that joins waits until the others come to the end of a step.
      .rendezvous_timeout = elastic ? std::max<std::chrono::milliseconds>(settings.timeout, 60s) : 60s,
      .stop = callbacks.stop,
      .silence = settings.silence,
      // In an elastic job a state may come from another rank.
      .configuration =
          common_settings(settings, workload.digests, resumed && !elastic ? &*resumed : nullptr) + measures_text(task),
      .seed = settings.seed,
      .on_warning = callbacks.on_warning};
  const auto keep_from_now_on = [&] {
    const fs::path& run = settings.keep.run_dir;
    const bool is_there =
        take_over(folder, settings, judge,
                  {.met = succession.met, .goes_on = goes_on_in_its_folder(settings), .warn = callbacks.on_warning});
    succession.writes = true;
    if (is_there && fs::exists(run / kMetricsFile))
      succession.told_epochs = static_cast<int>(read_metrics(run / kMetricsFile).size());
  };
  bool is_done = false;
  while (!is_done) {
    succession.is_last = !elastic;
    succession.ended_by_difference = false;
    not_finite.clear();
    try {
      if (elastic && !elastic->enter()) return result;  // it was done before this process could join
      if (elastic && !succession.writes && this_process().index == 0) keep_from_now_on();
      run(settings.devices, body, run_options);
      is_done = succession.is_last;
      if (succession.ended_by_difference) elastic->leave();
    } catch (const Stopped&) {
      result.stopped = true;
      is_done = true;
    } catch (const comm::ProcessDied&) {
      if (!elastic) throw;
      elastic->leave();
    }
    if (succession.state) resumed = std::exchange(succession.state, std::nullopt);
  }
  folder->finish(result.history, title, callbacks.on_warning);
  if (!not_finite.empty()) throw NotFinite(not_finite);
  if (trace && !trace->written() && !result.stopped) {
    callbacks.on_warning(settings.keep.trace.string() + " has no timeline: the run had no more than " +
                         std::to_string(kTraceAfterSteps) + " steps, which are not traced");
  }
  return result;
}

}  // namespace lockstep
