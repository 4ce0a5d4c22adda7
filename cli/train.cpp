// lockstep train: trains a network over several devices, shows how it goes, and keeps the run in a folder.
#include <lockstep/trainer.hpp>

#include <sys/resource.h>

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <set>
#include <string>
#include <system_error>

#include "commands.hpp"
#include "progress_bar.hpp"
#include "stop_signals.hpp"
#include "text.hpp"
#include "train_flags.hpp"

namespace lockstep::cli {

namespace {

const char* const examples =
    "Examples:\n"
    "  lockstep train\n"
    "      LeNet on Fashion-MNIST, on every GPU, or else on every CPU core.\n"
    "  lockstep train --devices 2 --batch-size 512 --lr 0.4 --name big-batch\n"
    "      Two devices; the run is kept in runs/big-batch.\n"
    "\n"
    "The run's folder holds config.json, metrics.jsonl, model.safetensors, curve.svg\n"
    "and curve.png, written after every epoch (curve.png at the end). Ctrl-C stops\n"
    "after the current step and keeps the finished epochs; a second one ends at once.\n";

std::string plural(size_t count, const char* noun) {
  return std::to_string(count) + " " + noun + (count == 1 ? "" : "s");
}

std::string settings(const TrainFlags& flags, const TrainOptions& options, const std::string& source) {
  Rows rows = {{"model", options.model},
               {"data", options.data == "synthetic" ? source : options.data + " in " + source},
               {"devices", to_string(options.devices) + ", " + plural(options.devices.size(), "rank")},
               {"threads per rank", std::to_string(options.threads_per_rank)},
               {"batch size", std::to_string(options.batch_size) + " over all ranks"},
               {"learning rate", format("%g", options.lr)},
               {"epochs", std::to_string(options.epochs)},
               {"seed", std::to_string(options.seed)},
               {"run folder", options.run_dir.string()}};
  if (!flags.config.empty()) rows.insert(rows.begin(), {"config", flags.config});
  return "lockstep " + version() + ", LibTorch " + torch_version() + "\n" + table(rows) + "\n";
}

std::string epoch_label(int epoch, int epochs) {
  const int digits = static_cast<int>(std::to_string(epochs).size());
  return format("epoch %*d/%d", digits, epoch, epochs);
}

std::string epoch_line(const EpochMetrics& metrics, int epochs, const std::string& remark) {
  return epoch_label(metrics.epoch, epochs) +
         format("  train loss %.4f  train acc %.4f  test acc %.4f  %.1f sec/epoch", metrics.train_loss,
                metrics.train_accuracy, metrics.test_accuracy, metrics.seconds) +
         remark + "\n";
}

std::string peak_memory() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return format("%.0f MB", static_cast<double>(usage.ru_maxrss) * 1024 / 1e6);
}

// What the trainer's callbacks show while it works.
class Report {
 public:
  Report(const TrainFlags& flags, const TrainOptions& options, Output& output)
      : flags_(flags),
        options_(options),
        output_(output),
        mode_(progress_mode(flags.progress, output.fd())),
        live_(output, mode_ == ProgressMode::bar),
        remark_(options.data == "synthetic" ? " (synthetic data)" : "") {}

  void loading() { live_.show("loading the data ..."); }

  void data_loaded(const std::string& source) { print(settings(flags_, options_, source)); }

  void step(const StepProgress& progress) {
    live_.show({.label = epoch_label(progress.epoch, options_.epochs),
                .done = progress.done,
                .total = progress.total,
                .seconds = progress.seconds,
                .note = format("loss=%.3f", progress.loss)});
  }

  void epoch(const EpochMetrics& metrics) {
    live_.clear();
    if (mode_ != ProgressMode::none) print(epoch_line(metrics, options_.epochs, remark_));
  }

  void warning(const std::string& message) {
    if (!warned_.insert(message).second) return;  // once is enough: curves are drawn every epoch
    live_.clear();
    Output(STDERR_FILENO).print("lockstep: warning: " + message + "\n");
  }

  void stopped(const TrainResult& result) {
    live_.clear();
    std::error_code unknown;
    const bool kept = std::filesystem::exists(options_.run_dir, unknown);
    const std::string text = "stopped after " + std::to_string(result.history.size()) + " of " +
                             plural(static_cast<size_t>(options_.epochs), "epoch") +
                             (kept ? "; the run is kept in " + options_.run_dir.string() : "; no run is kept") +
                             remark_ + "\n";
    if (output_.failed()) {
      Output(STDERR_FILENO).print("lockstep: " + text);
    } else {
      print(text);
    }
  }

  void finished(const TrainResult& result) {
    if (mode_ != ProgressMode::none) print("\n");
    print("the run is kept in " + options_.run_dir.string() + "; peak memory " + peak_memory() + "\n");
    print(
        format("test acc: %.2f, %.1f sec/epoch on ", result.history.back().test_accuracy, result.seconds_per_epoch()) +
        to_string(result.devices) + remark_ + "\n");
  }

 private:
  void print(const std::string& text) {
    live_.clear();
    output_.print(text);
  }

  const TrainFlags& flags_;
  const TrainOptions& options_;
  Output& output_;
  ProgressMode mode_;
  LiveLine live_;
  std::string remark_;
  std::set<std::string> warned_;
};

int train_command(const TrainFlags& flags, Output& output) {
  const TrainOptions options = to_options(flags);
  StopSignals signals;  // before LibTorch starts threads
  Report report(flags, options, output);

  // Wraps a member of `report`; a run that nobody can watch any more is stopped.
  const auto show = [&](auto member) {
    return [&, member](const auto& value) {
      (report.*member)(value);
      if (output.failed()) signals.request_stop();
    };
  };
  TrainCallbacks callbacks;
  callbacks.on_data = show(&Report::data_loaded);
  callbacks.on_step = show(&Report::step);
  callbacks.on_epoch = show(&Report::epoch);
  callbacks.on_warning = show(&Report::warning);
  callbacks.stop = signals.token();

  // LibTorch's profiler reports on the standard error output that there is no GPU.
  if (!options.trace.empty()) setenv("KINETO_LOG_LEVEL", "99", /*overwrite=*/0);
  report.loading();
  const TrainResult result = train(options, callbacks);
  if (!result.stopped) {
    report.finished(result);
    return 0;
  }
  report.stopped(result);
  return signals.received() == 0 ? 1 : 128 + signals.received();
}

}  // namespace

Command add_train(CLI::App& program) {
  CLI::App* const app = program.add_subcommand("train", "Train a network over several devices and keep the run.");
  app->footer(examples);
  const auto flags = std::make_shared<TrainFlags>();
  add_flags(*app, *flags);
  return {app, [flags](Output& output) { return train_command(*flags, output); }};
}

}  // namespace lockstep::cli
