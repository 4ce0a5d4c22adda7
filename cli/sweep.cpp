// lockstep sweep: trains a grid of devices, batch sizes, learning rates and rules to scale them, and says how each did.
#include <ATen/Parallel.h>
#include <unistd.h>
#include <lockstep/base/error.hpp>
#include <lockstep/data/data.hpp>
#include <lockstep/ranks/rank.hpp>
#include <lockstep/trainer/trainer.hpp>

#include <algorithm>
#include <cmath>
#include <condition_variable>
#include <exception>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "base/start_thread.hpp"
#include "commands.hpp"
#include "crowded_cores.hpp"
#include "io/atomic_file.hpp"
#include "io/folder_lock.hpp"
#include "progress_bar.hpp"
#include "stop_signals.hpp"
#include "sweep_grid.hpp"
#include "sweep_report.hpp"
#include "terminal.hpp"
#include "text.hpp"
#include "trainer/checkpoint_folder.hpp"
#include "trainer/run_folder.hpp"
#include "trainer/train_options.hpp"
#include "usage.hpp"

namespace lockstep::cli {

namespace {

namespace fs = std::filesystem;

const char* const sweep_examples =
    "Examples:\n"
    "  lockstep sweep --name rates --devices cpu --lr 0.05 0.1 0.2 0.4\n"
    "      Four runs of LeNet in runs/rates, as many at once as there are cores.\n"
    "  lockstep sweep --name large --devices 1 2 --batch-size 256 1024 4096 --lr 0.2\n"
    "    --scale-lr none sqrt linear --reference-batch 256 --warmup 2\n"
    "      Which rule suits larger batches? 256 samples are one run for all rules.\n"
    "\n"
    "All other flags hold for every run. Each has a folder in the sweep's, named by\n"
    "its place in the grid, as lockstep train makes it; table.md and plot.svg are\n"
    "beside them. The same command goes on where it was stopped, and with more values\n"
    "on an axis: what is finished stays, what was begun goes on from its newest\n"
    "checkpoint that is not damaged. The table and the plot are of the grid that was\n"
    "named last. If a run fails, the others are trained all the same, and the exit\n"
    "code is 1.\n";

// Throws Error if the run's folder holds a run with other settings. Where files lie does not matter, and the devices
// are in the folder's name.
void check_kept(const TrainOptions& options) {
  const fs::path config = options.keep.run_dir / kConfigFile;
  std::error_code none;
  if (fs::file_size(config, none) == 0 || none) return;  // empty: it was killed when it had just taken the folder
  nlohmann::json then = nlohmann::json::parse(to_json(read_config(options.keep.run_dir, options.devices)));
  nlohmann::json now = nlohmann::json::parse(to_json(options));
  for (const char* key : {"devices", "run_dir", "data_dir"}) now[key] = then[key];
  const nlohmann::json differences = nlohmann::json::diff(then, now);
  if (differences.empty()) return;
  throw Error(options.keep.run_dir.string() + " holds a run with another " +
              differences[0]["path"].get<std::string>().substr(1) +
              " than this sweep's; give the sweep another --name, or move that run away");
}

// The history of a finished run; empty if the run is not finished.
std::vector<EpochMetrics> finished_history(const TrainOptions& options) {
  const fs::path metrics = options.keep.run_dir / kMetricsFile;
  if (!fs::exists(metrics)) return {};
  auto history = read_metrics(metrics);
  if (history.size() < static_cast<size_t>(options.epochs)) history.clear();
  return history;
}

// The options with which the run goes on from its checkpoint, or from the beginning if it has none.
TrainOptions to_go_on(TrainOptions options, const std::function<void(const std::string&)>& warn) {
  try {
    options.keep.resume = checkpoint_to_go_on(options.keep.run_dir / kCheckpointFolder, warn);
  } catch (const Error& error) {
    warn(error.what() + std::string(", so the run begins anew"));
  }
  if (options.keep.resume.empty() && fs::exists(options.keep.run_dir / kConfigFile)) {
    clear_run(options.keep.run_dir);
  }
  return options;
}

// Works on several runs at once. Each has a thread of its own, and its ranks are threads as in lockstep train.
class Sweep {
 public:
  Sweep(std::vector<SweepRun>& runs, int jobs, StopOnSignals& signals, Output& output)
      : jobs_(jobs),
        cores_(cpu_cores()),
        signals_(signals),
        output_(output),
        live_(output, can_redraw(output.fd())),
        all_(runs.size()) {
    for (auto& run : runs) {
      if (run.history.empty()) waiting_.push_back(&run);
    }
  }

  // Trains what is not finished. Returns the names of the runs that failed.
  std::vector<std::string> work() {
    std::vector<std::jthread> threads;  // joined also when one cannot be started
    std::unique_lock lock(mutex_);
    while (!waiting_.empty() && !signals_.token().stop_requested()) {
      const auto next =
          std::find_if(waiting_.begin(), waiting_.end(), [&](const SweepRun* run) { return fits(run->options); });
      if (next == waiting_.end()) {
        changed_.wait(lock);
        continue;
      }
      SweepRun* const run = *next;
      waiting_.erase(next);
      at_work_[run] = 0;
      threads.push_back(start_thread<std::jthread>([this, run] { train_one(*run); }));
    }
    lock.unlock();
    threads.clear();
    live_.clear();
    return failed_;
  }

 private:
  // Each thread needs a core; runs on GPUs need these to themselves. One run may always work.
  bool fits(const TrainOptions& options) const {
    if (at_work_.empty()) return true;
    if (at_work_.size() >= static_cast<size_t>(jobs_)) return false;
    int threads = threads_of(options);
    for (const auto& [run, epoch] : at_work_) {
      threads += threads_of(run->options);
      const Devices &mine = options.devices, &others = run->options.devices;
      const bool share = std::find_first_of(mine.begin(), mine.end(), others.begin(), others.end()) != mine.end();
      if (share && !mine[0].is_cpu()) return false;
    }
    return threads <= cores_;
  }

  static int threads_of(const TrainOptions& options) {
    return static_cast<int>(options.devices.size()) * options.threads_per_rank;
  }

  void train_one(SweepRun& run) {
    const std::string name = grid_name(run.options);
    TrainCallbacks callbacks;
    callbacks.stop = signals_.token();
    callbacks.on_warning = [&](const std::string& message) { warn(name + ": " + message); };
    callbacks.on_epoch = [&](const EpochMetrics& metrics) {
      const std::lock_guard lock(mutex_);
      at_work_[&run] = metrics.epoch;
      show();
    };
    std::string end, error;
    try {
      const TrainResult result = train(to_go_on(run.options, callbacks.on_warning), callbacks);
      if (!result.stopped) end = summary(result);
    } catch (const std::exception& thrown) {
      error = thrown.what();
    }
    const std::lock_guard lock(mutex_);
    at_work_.erase(&run);
    if (!error.empty()) failed_.push_back(name);
    if (!error.empty()) end = "error: " + with_flags(error);
    if (!end.empty()) print(name + ": " + end + "\n");
    show();
    changed_.notify_all();
  }

  static std::string summary(const TrainResult& result) {
    const EpochMetrics& last = result.history.back();
    return format("test acc: %.4f, %.1f sec/epoch", last.test_accuracy, result.seconds_per_epoch()) +
           (std::isfinite(last.train_loss) ? "" : "; the train loss is not finite any more");
  }

  // Everything below except warn() needs the mutex.
  void show() {
    std::string text =
        std::to_string(all_ - waiting_.size() - at_work_.size()) + " of " + std::to_string(all_) + " runs done";
    for (const auto& [run, epoch] : at_work_) {
      text += format("; %s: epoch %d/%d", grid_name(run->options).c_str(), epoch, run->options.epochs);
    }
    live_.show(text);
  }

  void print(const std::string& text) {
    live_.clear();
    output_.print(text);
    if (output_.failed()) signals_.request_stop();  // nobody can watch any more
  }

  void warn(const std::string& text) {
    const std::lock_guard lock(mutex_);
    live_.clear();
    print_warning(text, error_);
  }

  const int jobs_, cores_;
  StopOnSignals& signals_;
  Output& output_;
  Output error_{STDERR_FILENO};
  LiveLine live_;
  const size_t all_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<SweepRun*> waiting_;
  std::map<const SweepRun*, int> at_work_;  // with the epochs that they have finished
  std::vector<std::string> failed_;
};

// Throws Error if the data cannot be read, or have fewer samples than a batch.
void check_batches(const std::vector<SweepRun>& runs) {
  const ImageData data = load_data(runs[0].options.data);
  for (const auto& run : runs) check_batch_size(run.options, data.train.size(), data.source);
}

void make_sweep_folder(const fs::path& folder) {
  if (fs::exists(folder / kConfigFile)) {
    throw Error(folder.string() + " is the folder of a run; give the sweep another --name");
  }
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) throw Error("cannot make the sweep's folder " + folder.string() + ": " + error.message());
}

size_t count_finished(const std::vector<SweepRun>& runs) {
  return std::count_if(runs.begin(), runs.end(), [](const SweepRun& run) { return !run.history.empty(); });
}

void keep_report(const std::vector<SweepRun>& runs, const fs::path& folder, double target, Output& output) {
  const std::string text = sweep_table(runs, target);
  io::write_file(folder / "table.md", text);
  output.print("\n" + text + "\n");
  try {
    draw_sweep(folder / "plot.svg", runs);
  } catch (const Error& error) {
    print_warning(error.what());
  }
}

int sweep_command(const SweepFlags& flags, Output& output) {
  if (this_process().count > 1) {
    throw Error("sweep trains its runs as threads of one process; start it without a launcher");
  }
  if (!flags.train.name) throw UsageError("--name is missing: the sweep's folder, by which the same command goes on");
  std::vector<SweepRun> runs = grid(flags);
  if (learns_text(runs[0].options.model)) {
    throw UsageError("a sweep compares test accuracies, and gpt has none; train each run by itself");
  }
  const fs::path folder = runs[0].options.keep.run_dir.parent_path();
  StopOnSignals signals(says_that_it_stops());
  const OutputAfterStop after_stop(output, signals.token());
  check_batches(runs);
  make_sweep_folder(folder);
  io::FolderLock lock;
  if (!lock.take(folder)) throw Error("another sweep trains in " + folder.string() + "; " + lock.advice());
  if (!lock.doubt().empty())
    print_warning(lock.doubt() + ", so a second sweep in it may not be refused: begin none there before this ends");
  for (auto& run : runs) {
    check_kept(run.options);
    run.history = finished_history(run.options);
  }
  output.print(format("lockstep %s, LibTorch %s\n%s in %s, %zu of them finished\n", version().c_str(),
                      torch_version().c_str(), plural(runs.size(), "run").c_str(), folder.c_str(),
                      count_finished(runs)));

  for (const auto& run : runs) {
    const auto crowd = text_of_crowded_cores(run.options.devices);
    if (crowd.empty()) continue;
    print_warning(crowd);
    break;
  }

  // A run sets the number of threads that new threads compute with, and restores the old one. So it is always this one.
  at::set_num_threads(runs[0].options.threads_per_rank);
  const auto failed = Sweep(runs, flags.jobs == 0 ? cpu_cores() : flags.jobs, signals, output).work();
  for (auto& run : runs) run.history = finished_history(run.options);
  const size_t finished = count_finished(runs);
  if (finished > 0) keep_report(runs, folder, flags.target, output);
  if (signals.token().stop_requested()) {
    output.print(
        format("stopped; %zu of %zu runs are finished, and the same command goes on\n", finished, runs.size()));
    return signals.received() == 0 ? 1 : 128 + signals.received();
  }
  output.print("the sweep is kept in " + folder.string() + "\n");
  if (failed.empty()) return 0;
  std::string names;
  for (const auto& name : failed) names += (names.empty() ? "" : ", ") + name;
  throw Error(format("%zu of %zu runs failed, and the same command tries them again: ", failed.size(), runs.size()) +
              names);
}

}  // namespace

Command add_sweep(CLI::App& program) {
  CLI::App* const app = program.add_subcommand("sweep", "Train a grid of devices, batch sizes and learning rates.");
  app->footer(sweep_examples);
  const auto flags = std::make_shared<SweepFlags>();
  add_flags(*app, *flags);
  return {app, [flags](Output& output) { return sweep_command(*flags, output); }};
}

}  // namespace lockstep::cli
