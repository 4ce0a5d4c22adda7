// lockstep train: trains a network over several devices, shows the progress, and keeps the run in a folder.
#include <sys/resource.h>
#include <unistd.h>
#include <lockstep/base/error.hpp>
#include <lockstep/devices/device_info.hpp>
#include <lockstep/devices/devices.hpp>
#include <lockstep/ranks/rank.hpp>
#include <lockstep/trainer/trainer.hpp>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <limits>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <system_error>
#include <variant>
#include <vector>

#include "base/number_text.hpp"
#include "chosen_ranks.hpp"
#include "comm/meeting/launch_environment.hpp"
#include "commands.hpp"
#include "crowded_cores.hpp"
#include "help.hpp"
#include "progress_bar.hpp"
#include "stop_signals.hpp"
#include "text.hpp"
#include "train_flags.hpp"
#include "train_plan.hpp"
#include "trainer/checkpoint_folder.hpp"
#include "trainer/flat_options.hpp"
#include "trainer/option_table.hpp"
#include "trainer/option_text.hpp"
#include "trainer/resume.hpp"
#include "trainer/run_folder.hpp"
#include "trainer/train_options.hpp"
#include "usage.hpp"

namespace lockstep::cli {

namespace {

const char* const first_examples =
    "Examples:\n"
    "  lockstep train\n"
    "      LeNet on Fashion-MNIST, on every GPU, or else on every CPU core.\n"
    "  lockstep train --devices 2 --batch-size 512 --lr 0.4 --name big-batch\n"
    "      Two devices; the run is kept in runs/big-batch.\n"
    "  lockstep train --resume last\n"
    "      Goes on with the last run from where it was stopped.\n";

const char* const more_examples =
    "  lockstep train --recipe fast\n"
    "      LeNet to a test accuracy of about 0.86, in one epoch.\n"
    "  lockstep train --model alexnet --width 0.25 --image-size 96 --lr 0.01\n"
    "      AlexNet, a quarter as wide, on smaller images: a reduced one for CPUs.\n"
    "  lockstep train --scale-batch 4 --scale-lr linear --warmup 2\n"
    "      Batches of 1024; the learning rate grows from 0.2 to 0.8 in two epochs.\n"
    "  lockstep train --model mlp --plan auto\n"
    "      By layers or channels too, if that is predicted to be faster here.\n"
    "  lockstep train --model gpt --text FILE --optimizer adamw --lr 0.003\n"
    "      A language model, which learns the bytes of any file.\n"
    "  lockstep train --sync-every 16 --outer-lr 0.7 --outer-momentum 0.9\n"
    "      Devices take 16 steps each by themselves between two averages: DiLoCo.\n"
    "\n"
    "The run's folder holds config.json, metrics.jsonl, model.safetensors and\n"
    "checkpoints/, written after every epoch, and report.html for a browser (with\n"
    "notes.json), written every some seconds and at the end.\n"
    "Ctrl-C, SIGTERM and SIGHUP stop within some steps and keep a checkpoint of that\n"
    "step; a second one ends at once.\n"
    "As processes: lockstep launch, mpirun, srun, torchrun --no-python.\n";

std::string ranks(const Devices& devices) {
  const int processes = this_process().count;
  return processes == 1 ? plural(devices.size(), "rank")
                        : "on each machine, for " + std::to_string(processes) + " processes";
}

std::string batch_text(const TrainOptions& options) {
  std::string text = std::to_string(options.batch.global()) + " over all ranks";
  if (options.batch.scale > 1) {
    text += ", " + std::to_string(options.batch.scale) + " times " + std::to_string(options.batch.size);
  }
  if (options.batch.accumulate > 1) text += ", in " + std::to_string(options.batch.accumulate) + " parts";
  return text;
}

std::string parts_setting(const TrainOptions& options) {
  return std::holds_alternative<PartsBySpeed>(options.batch.balance)
             ? "in proportion to measured speed"
             : "in shares of " + to_string(options.batch.balance);
}

// Every option that is not the default has a row, so that none is overlooked. `worded` names the options that
// `settings` words.
Rows other_settings(const TrainOptions& options) {
  static const std::string worded =
      " model width image_size groups dropout layers heads embedding context residual_dropout text data data_dir "
      "resume devices split threads_per_rank batch_size scale_batch accumulate balance optimizer momentum "
      "weight_decay clip lr scale_lr reference_batch warmup schedule step_epochs step_factor epochs seed precision "
      "memory_format sync_batchnorm zero_stage cuda_graph run_dir ";
  std::map<std::string, std::string> defaults;
  const TrainOptions unchanged;
  each_option(unchanged, [&](const Option& option, const auto& value) { defaults[option.key] = option_text(value); });
  Rows rows;
  each_option(options, [&](const Option& option, const auto& value) {
    std::string name = option.key;
    if (worded.find(" " + name + " ") != worded.npos || option_text(value) == defaults[name]) return;
    std::replace(name.begin(), name.end(), '_', ' ');
    rows.push_back({name, option_text(value)});
  });
  return rows;
}

std::string settings(const TrainFlags& flags, const TrainOptions& options, bool fastest, const std::string& source) {
  Rows rows = {
      {"model", to_string(options.model)},
      {"data", !std::holds_alternative<FashionMnist>(options.data)
                   ? source
                   : std::string(to_string(flat(options).data)) + " in " + source},
      {"devices",
       to_string(options.devices) + ", " + ranks(options.devices) + (fastest ? ", the fastest way here" : "")},
      {"threads per rank", std::to_string(options.threads_per_rank)},
      {"batch size", batch_text(options)},
      {"optimizer",
       to_string(options.optimizer.kind, optimizer_settings(options)) +
           (options.optimizer.clip > 0 ? ", gradients clipped to norm " + number_text(options.optimizer.clip) : "")},
      {"learning rate", to_string(learning_rate_of(options))},
      {"epochs", std::to_string(options.epochs)},
      {"seed", std::to_string(options.seed)},
      {"precision", std::string(to_string(options.precision))},
      {"memory format", std::string(to_string(options.memory_format))},
      {"CUDA graph", options.cuda_graph ? "yes" : "no"},
      {"run folder", options.keep.run_dir.string()}};
  if (const int stage = flat(options).zero_stage; stage > 0)
    rows.insert(rows.end() - 1, {"ZeRO stage", std::to_string(stage)});
  if (options.sync_batchnorm) rows.insert(rows.end() - 1, {"BatchNorm", "over all ranks"});
  if (options.batch.balance != BalanceRule()) rows.insert(rows.begin() + 5, {"parts", parts_setting(options)});
  if (const auto split = flat(options).split) rows.insert(rows.begin() + 3, {"split", to_string(*split)});
  for (auto& row : other_settings(options)) rows.insert(rows.end() - 1, std::move(row));
  if (!flags.config.empty()) rows.insert(rows.begin(), {"config", flags.config});
  if (!options.keep.resume.empty()) rows.insert(rows.begin(), {"goes on from", options.keep.resume.string()});
  return "lockstep " + version() + ", LibTorch " + torch_version() + "\n" + table(rows) + "\n";
}

std::string epoch_label(int epoch, int epochs) {
  const int digits = static_cast<int>(std::to_string(epochs).size());
  return format("epoch %*d/%d", digits, epoch, epochs);
}

// Gives no digits and no sign if the loss is not finite, since these mean nothing then.
std::string loss_text(double loss, int digits) {
  if (std::isnan(loss)) return "nan";
  return std::isinf(loss) ? "inf" : format("%.*f", digits, loss);
}

// Gives "170 + 86".
std::string parts_text(const std::vector<int64_t>& parts) {
  std::string text;
  for (const int64_t part : parts) text += (text.empty() ? "" : " + ") + std::to_string(part);
  return text;
}

// Gives a measure of a text's held-out bytes.
double test_measure(const EpochMetrics& metrics, const char* name) {
  const auto found = metrics.test.find(name);
  return found == metrics.test.end() ? std::numeric_limits<double>::quiet_NaN() : found->second;
}

bool is_of_text(const EpochMetrics& metrics) {
  return metrics.test.contains("perplexity");
}

std::string measures(const EpochMetrics& metrics) {
  if (!is_of_text(metrics))
    return format("  train acc %.4f  test acc %.4f", metrics.train_accuracy, metrics.test_accuracy);
  return "  test loss " + loss_text(test_measure(metrics, "loss"), 4) + "  perplexity " +
         loss_text(test_measure(metrics, "perplexity"), 3);
}

std::string epoch_line(const EpochMetrics& metrics, int epochs, const std::string& remark) {
  return epoch_label(metrics.epoch, epochs) + "  train loss " + loss_text(metrics.train_loss, 4) + measures(metrics) +
         format("  %.1f sec/epoch", metrics.seconds) +
         (metrics.parts.empty() ? "" : "  parts " + parts_text(metrics.parts)) + remark + "\n";
}

// Gives "" for one rank alone, which sends nothing.
std::string sent(double bytes_per_step) {
  return bytes_per_step > 0 ? format("; a rank sent %.4g MB per step", bytes_per_step / 1e6) : "";
}

std::string peak_memory() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return format("%.0f MB", static_cast<double>(usage.ru_maxrss) * 1024 / 1e6);
}

// Shows the reports of the trainer's callbacks.
class RunReport {
 public:
  RunReport(const TrainFlags& flags, const TrainOptions& options, bool fastest, const StopOnSignals& signals,
            Output& output)
      : flags_(flags),
        options_(options),
        fastest_(fastest),
        output_(output),
        error_after_stop_(error_, signals.token()),
        mode_(progress_mode(flags.progress, output.fd())),
        live_(output, mode_ == ProgressMode::bar),
        remark_(std::holds_alternative<SyntheticImages>(options.data) ? " (synthetic data)" : "") {}

  void planning() { live_.show("measuring the network and the devices ..."); }
  void planned(const std::string& line) { print(line); }

  void loading() { live_.show("loading the data ..."); }

  void data_loaded(const std::string& source) {
    started_ = true;
    print(settings(flags_, options_, fastest_, source));
    if (const auto crowd = text_of_crowded_cores(options_.devices); !crowd.empty()) warning(crowd);
  }

  void step(const StepProgress& progress) {
    live_.show({.label = epoch_label(progress.epoch, options_.epochs),
                .done = progress.done,
                .total = progress.total,
                .seconds = progress.seconds,
                .note = "loss=" + loss_text(progress.loss, 3) + (remark_.empty() ? "" : ", synthetic data")});
  }

  void epoch(const EpochMetrics& metrics) {
    epochs_ = static_cast<size_t>(metrics.epoch);
    live_.clear();
    if (mode_ != ProgressMode::none) print(epoch_line(metrics, options_.epochs, remark_));
    if (!std::isfinite(metrics.train_loss)) {
      warning("the train loss is not finite any more, so this run learns nothing further; try a smaller --lr than " +
              number_text(learning_rate_of(options_).lr));
    }
  }

  void warning(const std::string& message) {
    if (!warned_.insert(message).second) return;  // one warning is enough: a report is written again and again
    live_.clear();
    print_warning(message, error_);
  }

  void not_finite(const Error& error) {
    live_.clear();
    error_.print("lockstep: error: " + std::string(error.what()) + ", and the run ends; " + kept() +
                 ". Try a smaller --lr than " + number_text(learning_rate_of(options_).lr) +
                 (options_.on_nan == OnNan::skip ? "\n" : ", or --on-nan skip\n"));
  }

  // These tell whether the run began, so that there could be something to keep, and what was kept.
  bool started() const { return started_; }
  std::string kept() const {
    return epochs_ > 0 || can_go_on() ? "the run is kept in " + options_.keep.run_dir.string() : "no run is kept";
  }

  void stopped(const TrainResult& result) {
    live_.clear();
    std::string text = "stopped after " + std::to_string(result.history.size()) + " of " +
                       plural(static_cast<size_t>(options_.epochs), "epoch") + "; " + kept() + remark_ + "\n";
    if (can_go_on()) text += "to go on: lockstep train --resume " + options_.keep.run_dir.string() + "\n";
    if (!output_.failed()) print(text);
    if (!output_.failed() && output_.finish(kPatienceAfterStop)) return;
    output_.give_up();
    error_.print("lockstep: " + text);
  }

  void finished(const TrainResult& result) {
    if (mode_ != ProgressMode::none) print("\n");
    const int processes = this_process().count;
    print(kept() + remark_ + "; peak memory " + peak_memory() + (processes == 1 ? "" : " in this process") +
          format("; waiting for data took %.2f %% of the time", 100 * result.data_wait()) +
          sent(result.history.back().bytes_per_step) + "\n");
    std::error_code none;  // a run of too few steps has no trace, and has said so
    if (!options_.keep.trace.empty() && std::filesystem::file_size(options_.keep.trace, none) > 0 && !none) {
      print("the trace is in " + options_.keep.trace.string() +
            (processes == 1 ? "" : ", of each other process in a file with its number") +
            "; ui.perfetto.dev shows it\n");
    }
    if (const auto& weights = result.history.back().weights; !weights.empty()) print("weights " + weights + "\n");
    if (const auto& parts = result.history.back().parts; !parts.empty())
      print("parts of a batch: " + parts_text(parts) + "\n");
    if (!result.straggler.empty()) print(with_flags(result.straggler) + "\n");
    const EpochMetrics& last = result.history.back();
    print((is_of_text(last) ? "perplexity: " + loss_text(test_measure(last, "perplexity"), 2)
                            : format("test acc: %.2f", last.test_accuracy)) +
          format(", %.1f sec/epoch on ", result.seconds_per_epoch()) + to_string(result.devices) +
          (processes == 1 ? "" : " in " + std::to_string(processes) + " processes") + remark_ + "\n");
  }

 private:
  void print(const std::string& text) {
    live_.clear();
    output_.print(text);
  }

  bool can_go_on() const { return !newest_checkpoint(options_.keep.run_dir / kCheckpointFolder).empty(); }

  const TrainFlags& flags_;
  const TrainOptions& options_;
  const bool fastest_;
  Output& output_;
  Output error_{STDERR_FILENO};
  const OutputAfterStop error_after_stop_;
  ProgressMode mode_;
  LiveLine live_;
  std::string remark_;
  bool started_ = false;
  size_t epochs_ = 0;  // epochs that are finished and kept
  std::set<std::string> warned_;
};

// Trains in options.keep.run_dir. If the user named no folder, and another run that started at the same moment took
// this one, trains in the next folder.
TrainResult train_in_own_folder(const TrainFlags& flags, TrainOptions& options, const TrainCallbacks& callbacks) {
  for (;;) {
    try {
      return train(options, callbacks);
    } catch (const Error& error) {
      const bool is_taken = error.options() == std::vector<std::string>{"run_dir"};
      if (!is_taken || flags.name || !flags.resume().empty()) throw;
      options.keep.run_dir = new_run_dir(flags, options);
    }
  }
}

int exit_code(const TrainResult& result, const StopOnSignals& signals) {
  if (!result.stopped) return 0;
  return 128 + (signals.received() == 0 ? SIGTERM : signals.received());  // 0: another process got the signal
}

// The processes of an elastic job come at different times, and any of them may have to go on with the run.
void check_elastic_flags(const TrainFlags& flags) {
  if (!flags.name && flags.resume().empty()) {
    throw UsageError("in an elastic job every process must know the run's folder; give --name");
  }
  if (flags.plan() == "auto") throw UsageError("--plan auto cannot go with an elastic job; leave it out");
}

// Chooses the ranks where the user leaves them open. Returns whether these were measured to be the fastest.
bool takes_the_fastest_ranks(const TrainFlags& flags, TrainOptions& options) {
  if (!leaves_ranks_open(flags, options)) return false;
  const bool measured = choose_ranks(options);
  if (!flags.name) options.keep.run_dir = new_run_dir(flags, options);
  return measured;
}

// Only the process with rank 0 of a launched job prints, and keeps the run. Any process of an elastic job may become
// that one.
int train_command(const TrainFlags& flags, Output& output) {
  TrainOptions options = to_options(flags);
  const bool fastest = takes_the_fastest_ranks(flags, options);
  const auto launch = comm::read_launch_environment(std::getenv);
  const bool elastic = launch && launch->member >= 0;
  if (elastic) check_elastic_flags(flags);
  const bool is_first = this_process().index == 0;
  StopOnSignals signals(says_that_it_stops(/*quiet=*/!is_first));
  const OutputAfterStop after_stop(output, signals.token());
  RunReport report(flags, options, fastest, signals, output);

  // Wraps a member of `report`. Stops a run that nobody can watch any more.
  const auto show = [&](auto member) {
    return [&, member](const auto& value) {
      (report.*member)(value);
      if (output.failed()) signals.request_stop();
    };
  };
  TrainCallbacks callbacks;
  callbacks.stop = signals.token();
  // LibTorch's profiler reports on the standard error output that there is no GPU.
  if (!options.keep.trace.empty()) setenv("KINETO_LOG_LEVEL", "99", /*overwrite=*/0);
  if (flags.plan() == "auto") {
    if (is_first) report.planning();
    const std::string line = plan_here(options);
    if (is_first) report.planned(line);
  }
  callbacks.on_warning = [](const std::string&) {};
  const bool may_print = is_first || elastic;
  if (may_print) {
    callbacks.on_data = show(&RunReport::data_loaded);
    callbacks.on_step = show(&RunReport::step);
    callbacks.on_epoch = show(&RunReport::epoch);
    callbacks.on_warning = show(&RunReport::warning);
  }

  if (is_first && flags.resume() == "auto" && options.keep.resume.empty()) {
    options.keep.resume = "auto";  // removes what a killed run left; it changes nothing else
    options = with_resume_found(options, callbacks.on_warning);
  }
  if (is_first) report.loading();
  try {
    const TrainResult result = may_print ? train_in_own_folder(flags, options, callbacks) : train(options, callbacks);
    if (this_process().index != 0) return exit_code(result, signals);
    if (!result.stopped) {
      report.finished(result);
      return 0;
    }
    report.stopped(result);
    return exit_code(result, signals);
  } catch (const Error& error) {
    if (error.cause() == Error::not_finite) {
      if (this_process().index == 0) report.not_finite(error);
      return kNotFinite;
    }
    if (!report.started()) throw;
    throw Error(std::string(error.what()) + "; " + report.kept(), error.data());
  }
}

}  // namespace

Command add_train(CLI::App& program) {
  CLI::App* const app = program.add_subcommand("train", "Train a network over several devices and keep the run.");
  const auto flags = std::make_shared<TrainFlags>();
  add_flags(*app, *flags);
  app->set_help_all_flag("--help-all", "print all flags and exit");
  app->formatter(std::make_shared<Help>(
      std::vector<std::string>{"--devices", "--model", "--data-dir", "--batch-size", "--grain", "--lr", "--epochs",
                               "--name", "--resume", "--help", "--help-all"},
      std::string(first_examples) + "\nlockstep train --help-all shows all flags, and more examples.\n"));
  app->footer(std::string(first_examples) + more_examples);
  return {app, [flags](Output& output) { return train_command(*flags, output); }};
}

}  // namespace lockstep::cli
