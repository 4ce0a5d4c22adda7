#include "sweep_report.hpp"

#include <lockstep/devices/devices.hpp>
#include <lockstep/optim/learning_rate.hpp>

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <set>

#include "base/number_text.hpp"
#include "commands.hpp"
#include "io/gnuplot.hpp"
#include "run_name.hpp"
#include "text.hpp"
#include "trainer/exchange_options.hpp"
#include "trainer/train_options.hpp"

namespace lockstep::cli {

namespace {

struct Reached {
  int epoch;
  double seconds;
};

std::optional<Reached> first_at(const std::vector<EpochMetrics>& history, double accuracy) {
  double seconds = 0;
  for (const auto& metrics : history) {
    seconds += metrics.seconds;
    if (metrics.test_accuracy >= accuracy) return Reached{metrics.epoch, seconds};
  }
  return std::nullopt;
}

double best_accuracy(const std::vector<EpochMetrics>& history) {
  const auto worse = [](const auto& a, const auto& b) { return a.test_accuracy < b.test_accuracy; };
  return std::max_element(history.begin(), history.end(), worse)->test_accuracy;
}

// The learning rate, without warm-up and schedule.
double scaled_rate(const TrainOptions& options) {
  const LearningRate rate = learning_rate_of(options);
  return learning_rate_at(
      {.lr = rate.lr, .batch = rate.batch, .reference_batch = rate.reference_batch, .scaling = rate.scaling}, 0);
}

std::vector<std::string> cells_of(const SweepRun& run, double target) {
  const TrainOptions& options = run.options;
  std::vector<std::string> cells = {short_name(options.devices), std::to_string(options.batch.global()),
                                    number_text(learning_rate_of(options).lr),
                                    std::string(to_string(options.rate.scaling)), format("%.4g", scaled_rate(options))};
  if (run.history.empty()) {
    cells.insert(cells.end(), 6, "-");
    return cells;
  }
  const EpochMetrics& last = run.history.back();
  const auto reached = first_at(run.history, target);
  TrainResult result;
  result.history = run.history;
  for (const std::string& cell :
       {format("%.4f", last.test_accuracy), format("%.4f", best_accuracy(run.history)),
        reached ? std::to_string(reached->epoch) : "-", reached ? format("%.1f", reached->seconds) : "-",
        format("%.2f", result.seconds_per_epoch()),
        std::isnan(last.train_loss) ? "nan" : format("%.4g", last.train_loss)}) {
    cells.push_back(cell);
  }
  return cells;
}

std::string markdown(const std::vector<std::vector<std::string>>& rows) {
  std::vector<size_t> widths(rows[0].size());
  for (const auto& row : rows) {
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string text;
  for (const auto& row : rows) {
    for (size_t i = 0; i < row.size(); ++i) text += "| " + std::string(widths[i] - row[i].size(), ' ') + row[i] + " ";
    text += "|\n";
    if (&row != &rows[0]) continue;
    for (const size_t width : widths) text += "|" + std::string(width + 1, '-') + ":";
    text += "|\n";
  }
  return text;
}

std::string settings_in_common(const std::vector<SweepRun>& runs) {
  const auto scaled = std::find_if(runs.begin(), runs.end(), [](const SweepRun& run) { return !run.is_reference; });
  const TrainOptions& options = (scaled == runs.end() ? runs.front() : *scaled).options;
  std::string text = to_string(options.model) + " on " + std::string(to_string(options.data.source)) + ", " +
                     std::to_string(options.epochs) + (options.epochs == 1 ? " epoch of " : " epochs of ") +
                     to_string(options.optimizer.kind, optimizer_settings(options));
  if (options.rate.warmup_epochs > 0) text += ", " + number_text(options.rate.warmup_epochs) + " of them warm-up";
  if (options.rate.schedule != LrSchedule::constant)
    text += ", schedule " + std::string(to_string(options.rate.schedule));
  if (options.rate.reference_batch > 0) text += ", reference batch " + std::to_string(options.rate.reference_batch);
  if (options.batch.accumulate > 1) text += ", batches in " + std::to_string(options.batch.accumulate) + " parts";
  if (const auto exchange = exchange_text(options.exchange); !exchange.empty()) text += ", " + exchange;
  if (options.sync_batchnorm) text += ", SyncBatchNorm";
  if (options.batch.balance != BalanceRule()) text += ", balance " + to_string(options.batch.balance);
  if (options.precision != Precision::float32) text += ", " + std::string(to_string(options.precision));
  return text + ", seed " + std::to_string(options.seed);
}

struct Line {
  std::string title;
  std::map<double, double> points;
};

std::map<double, double>& points_of(std::vector<Line>& lines, const std::string& title) {
  const auto line = std::find_if(lines.begin(), lines.end(), [&](const Line& other) { return other.title == title; });
  return line == lines.end() ? lines.emplace_back(Line{title, {}}).points : line->points;
}

// Lines in the grid's order. Over the batch, the reference batch is a point of every rule's line.
std::vector<Line> plotted_lines(const std::vector<SweepRun>& runs, bool over_batch) {
  std::set<LrScaling> rules;
  for (const auto& run : runs) {
    if (!run.is_reference) rules.insert(run.options.rate.scaling);  // at the reference batch all rules are one
  }
  if (rules.empty()) rules.insert(LrScaling::none);
  std::vector<Line> lines;
  for (const auto& run : runs) {
    if (run.history.empty() || learning_rate_of(run.options).lr == 0) continue;  // the axis is logarithmic
    const TrainOptions& options = run.options;
    const int64_t batch = options.batch.global();
    const std::string what =
        short_name(options.devices) +
        (over_batch ? ", lr " + number_text(learning_rate_of(options).lr) : ", batch " + std::to_string(batch));
    for (const LrScaling rule : rules) {
      if (rule != options.rate.scaling && !(run.is_reference && over_batch)) continue;
      auto& points = points_of(lines, rules.size() == 1 ? what : what + ", " + std::string(to_string(rule)));
      points[over_batch ? static_cast<double>(batch) : learning_rate_of(options).lr] = run.history.back().test_accuracy;
    }
  }
  return lines;
}

bool has_more_batches_than_rates(const std::vector<SweepRun>& runs) {
  std::set<int64_t> batches;
  std::set<double> rates;
  for (const auto& run : runs) {
    batches.insert(run.options.batch.global());
    rates.insert(learning_rate_of(run.options).lr);
  }
  return batches.size() > rates.size();
}

}  // namespace

std::string sweep_table(const std::vector<SweepRun>& runs, double target) {
  const std::string accuracy = number_text(target);
  std::vector<std::vector<std::string>> rows = {{"devices", "batch", "lr", "rule", "scaled lr", "test acc", "best",
                                                 "epochs to " + accuracy, "seconds to " + accuracy, "sec/epoch",
                                                 "train loss"}};
  for (const auto& run : runs) rows.push_back(cells_of(run, target));
  return settings_in_common(runs) + ". LibTorch " + torch_version() + ", " + std::to_string(cpu_cores()) +
         " CPU cores; seconds are of training alone, and longer where runs trained beside each other.\n\n" +
         markdown(rows);
}

void draw_sweep(const std::filesystem::path& file, const std::vector<SweepRun>& runs) {
  const bool over_batch = has_more_batches_than_rates(runs);
  std::string data, plot;
  std::set<double> marks;
  int number = 0;
  for (const auto& [title, points] : plotted_lines(runs, over_batch)) {
    const std::string name = "$line" + std::to_string(++number);
    data += name + " << END\n";
    for (const auto& [x, accuracy] : points) {
      data += number_text(x) + " " + number_text(accuracy) + "\n";
      marks.insert(x);
    }
    data += "END\n";
    plot += (number == 1 ? "plot " : ", \\\n     ") + name + " using 1:2 title " + io::gnuplot_string(title) +
            " linewidth 2 pointtype 7";
  }
  std::string axis = "set logscale x\nset xlabel '" + std::string(over_batch ? "batch size" : "learning rate") + "'\n";
  if (!marks.empty()) {
    axis += "set xrange [" + number_text(*marks.begin() / 1.1) + ":" + number_text(*marks.rbegin() * 1.1) + "]\n";
    axis += "set xtics (";
    for (const double mark : marks) axis += (mark == *marks.begin() ? "" : ", ") + number_text(mark);
    axis += ")\n";
  }
  io::draw(file, data + axis + "set label " + io::gnuplot_string(settings_in_common(runs)) +
                     R"( noenhanced at screen 0.5,0.95 center
set tmargin at screen 0.88
set ylabel 'test accuracy after the last epoch'
set yrange [0:1]
set key outside right top noenhanced
set pointsize 0.6
set style data linespoints
)" + plot + "\n");
}

}  // namespace lockstep::cli
