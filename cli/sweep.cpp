// lockstep sweep: trains a grid of devices, batch sizes, learning rates and rules to scale them, one run after another.
#include "sweep.hpp"

#include <lockstep/base/error.hpp>
#include <lockstep/data/data.hpp>
#include <lockstep/optim/learning_rate.hpp>
#include <lockstep/ranks/rank.hpp>
#include <nlohmann/json.hpp>

#include <cmath>
#include <map>
#include <memory>
#include <set>

#include "base/number_text.hpp"
#include "commands.hpp"
#include "crowded_cores.hpp"
#include "io/atomic_file.hpp"
#include "run_name.hpp"
#include "stop_signals.hpp"
#include "text.hpp"
#include "trainer/flat_options.hpp"
#include "trainer/option_text.hpp"
#include "trainer/report_page.hpp"
#include "trainer/run_folder.hpp"
#include "trainer/train_options.hpp"
#include "usage.hpp"

namespace lockstep::cli {

namespace {

const char* const sweep_examples =
    "Examples:\n"
    "  lockstep sweep --name rates --devices cpu --lr 0.05 0.1 0.2 0.4\n"
    "      Four runs of LeNet in runs/rates, one after another.\n"
    "  lockstep sweep --name large --devices 1 2 --batch-size 256 1024 4096 --lr 0.2\n"
    "    --scale-lr none sqrt linear --reference-batch 256 --warmup 2\n"
    "      Which rule suits larger batches? 256 samples are one run for all rules.\n"
    "\n"
    "All other flags hold for every run. Each is as lockstep train --resume auto\n"
    "makes it, in a folder of the sweep's that is named by its place in the grid. So\n"
    "the same command goes on where it was stopped, and with more values on an axis.\n"
    "table.txt and report.html lie beside the runs. If one fails, the exit code is 1.\n";

std::string end_of(const TrainResult& result) {
  const EpochMetrics& last = result.history.back();
  return format("test acc: %.4f, %.1f sec/epoch", last.test_accuracy, result.seconds_per_epoch()) +
         (std::isfinite(last.train_loss) ? "" : "; the train loss is not finite any more");
}

// Tells whether the run failed.
bool train_one(SweepRun& run, const StopOnSignals& signals, Output& output) {
  const std::string name = run.options.keep.run_dir.filename();
  TrainCallbacks callbacks;
  callbacks.stop = signals.token();
  callbacks.on_warning = [&](const std::string& text) { print_warning(name + ": " + text); };
  try {
    const TrainResult result = train(run.options, callbacks);
    if (result.stopped) return false;
    run.result = result;
    output.print(name + ": " + end_of(result) + "\n");
    return false;
  } catch (const std::exception& error) {
    output.print(name + ": error: " + with_flags(error.what()) + "\n");
    return true;
  }
}

std::vector<std::string> cells_of(const SweepRun& run) {
  const LearningRate rate = learning_rate_of(run.options);
  const double scaled = learning_rate_at(
      {.lr = rate.lr, .batch = rate.batch, .reference_batch = rate.reference_batch, .scaling = rate.scaling}, 0);
  std::vector<std::string> cells = {short_name(run.options.devices), std::to_string(rate.batch), number_text(rate.lr),
                                    std::string(to_string(rate.scaling)), format("%.4g", scaled)};
  std::vector<std::string> measured(3, "-");
  if (!run.result.history.empty()) {
    const EpochMetrics& last = run.result.history.back();
    const std::string loss = std::isnan(last.train_loss) ? "nan" : format("%.4g", last.train_loss);
    measured = {format("%.4f", last.test_accuracy), format("%.2f", run.result.seconds_per_epoch()), loss};
  }
  cells.insert(cells.end(), measured.begin(), measured.end());
  return cells;
}

std::string title_of(const TrainOptions& options) {
  return to_string(options.model) + " on " + std::string(to_string(flat(options).data)) + ", " +
         plural(static_cast<size_t>(options.epochs), "epoch") + " of " +
         to_string(options.optimizer.kind, optimizer_settings(options)) + ", seed " + std::to_string(options.seed);
}

std::string table_of(const std::vector<SweepRun>& runs) {
  std::vector<std::vector<std::string>> rows = {
      {"devices", "batch", "lr", "rule", "scaled lr", "test acc", "sec/epoch", "train loss"}};
  for (const auto& run : runs) rows.push_back(cells_of(run));
  return title_of(runs[0].options) + "\n" + aligned(rows);
}

// Gives a chart of the last test accuracies over the axis batch size or learning rate, whichever is longer.
nlohmann::ordered_json chart_of(const std::vector<SweepRun>& runs) {
  std::set<double> batches, rates;
  for (const auto& run : runs) {
    batches.insert(static_cast<double>(run.options.batch.global()));
    rates.insert(learning_rate_of(run.options).lr);
  }
  const bool over_batch = batches.size() > rates.size();
  std::map<std::string, std::map<double, double>> lines;
  for (const auto& [options, result] : runs) {
    const double batch = static_cast<double>(options.batch.global()), lr = learning_rate_of(options).lr;
    if (result.history.empty() || lr == 0) continue;  // a logarithmic axis has no 0
    const std::string other = over_batch ? ", lr " + number_text(lr) : ", batch " + number_text(batch);
    lines[short_name(options.devices) + other + ", " + std::string(to_string(options.rate.scaling))]
         [over_batch ? batch : lr] = result.history.back().test_accuracy;
  }
  nlohmann::ordered_json chart = {{"title", "Test accuracy after the last epoch"},
                                  {"x", over_batch ? "batch size" : "learning rate"},
                                  {"log_x", true},
                                  {"one", true},
                                  {"lines", nlohmann::ordered_json::array()}};
  for (const auto& [name, points] : lines) {
    nlohmann::ordered_json line = {{"name", name}, {"points", nlohmann::ordered_json::array()}};
    for (const auto& [x, accuracy] : points) line["points"].push_back(nlohmann::ordered_json::array({x, accuracy}));
    chart["lines"].push_back(std::move(line));
  }
  return chart;
}

// Makes the page of the sweep's runs that have an epoch. Those of an earlier sweep in the folder are left out.
void write_page(const std::filesystem::path& folder, const std::vector<SweepRun>& runs) {
  std::vector<std::filesystem::path> folders;
  for (const auto& run : runs) {
    if (!run.result.history.empty()) folders.push_back(run.options.keep.run_dir);
  }
  if (folders.empty()) return;
  write_report_page(folder / kReportFile, folders, nlohmann::ordered_json::array({chart_of(runs)}),
                    "Sweep " + folder.filename().string() + ": " + title_of(runs[0].options));
}

// Throws Error before the first run begins, for mistakes that would fail every run.
void check(const std::vector<SweepRun>& runs, const std::filesystem::path& folder) {
  if (std::filesystem::exists(folder / kConfigFile))
    throw Error(folder.string() + " is the folder of a run; give the sweep another --name", {Error::file});
  const ImageData data = load_data(runs[0].options.data);
  for (const auto& run : runs) check_batch_size(run.options, data.train.size(), data.source);
}

int sweep_command(const SweepFlags& flags, Output& output) {
  if (this_process().count > 1) throw Error("sweep trains its runs in one process; start it without a launcher");
  if (!flags.train.name) throw UsageError("--name is missing: the sweep's folder, by which the same command goes on");
  std::vector<SweepRun> runs = grid(flags);
  if (learns_text(runs[0].options.model))
    throw UsageError("a sweep compares test accuracies, and gpt has none; train each run by itself");
  const auto folder = runs[0].options.keep.run_dir.parent_path();
  StopOnSignals signals(says_that_it_stops());
  const OutputAfterStop after_stop(output, signals.token());
  check(runs, folder);
  output.print(plural(runs.size(), "run") + " in " + folder.string() + "\n");
  std::string crowd, failed;
  for (const auto& run : runs) crowd = crowd.empty() ? text_of_crowded_cores(run.options.devices) : crowd;
  if (!crowd.empty()) print_warning(crowd);
  for (auto& run : runs) {
    if (output.failed()) signals.request_stop();  // nobody can watch any more
    if (signals.token().stop_requested()) break;
    if (train_one(run, signals, output)) failed += " " + run.options.keep.run_dir.filename().string();
  }
  if (signals.token().stop_requested()) {
    output.print("stopped; the same command goes on\n");
    return signals.received() == 0 ? 1 : 128 + signals.received();
  }
  const std::string table = table_of(runs);
  io::write_file(folder / "table.txt", table);
  output.print("\n" + table + "\n");
  try {
    write_page(folder, runs);
  } catch (const Error& error) {
    print_warning(error.what());
  }
  if (failed.empty()) return 0;
  throw Error("some runs failed, and the same command tries them again:" + failed);
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
