#include <lockstep/base/error.hpp>
#include <lockstep/trainer/metrics.hpp>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <exception>
#include <fstream>
#include <iterator>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <system_error>

#include "base/classic.hpp"
#include "io/atomic_file.hpp"
#include "io/gnuplot.hpp"
#include "metrics_text.hpp"

namespace lockstep {
namespace {

using Json = nlohmann::ordered_json;

// JSON has no NaN and no infinity: a loss that diverged is written as null and read as NaN.
double number(const Json& line, const char* key) {
  if (!line.contains(key)) throw Error("it lacks '" + std::string(key) + "'", {Error::file});
  if (line[key].is_null()) return std::numeric_limits<double>::quiet_NaN();
  if (!line[key].is_number())
    throw Error("its '" + std::string(key) + "' is not a number: " + line[key].dump(), {Error::file});
  return line[key].get<double>();
}

std::vector<int64_t> parts_of(const Json& line) {
  if (!line.contains("parts")) return {};
  const Json& parts = line["parts"];
  const auto whole = [](const Json& part) { return part.is_number_integer(); };
  if (!parts.is_array() || !std::all_of(parts.begin(), parts.end(), whole)) {
    throw Error("its 'parts' is not a list of whole numbers: " + parts.dump(), {Error::file});
  }
  return parts.get<std::vector<int64_t>>();
}

std::map<std::string, double> test_of(const Json& line) {
  std::map<std::string, double> test;
  if (!line.contains("test")) return test;
  if (!line["test"].is_object()) throw Error("its 'test' is not a JSON object: " + line["test"].dump(), {Error::file});
  for (const auto& item : line["test"].items()) test[item.key()] = number(line["test"], item.key().c_str());
  return test;
}

EpochMetrics parse(const std::string& text) {
  Json line = Json::parse(text);
  if (!line.is_object()) throw Error("it is not a JSON object", {Error::file});
  if (!line.contains("epoch") || !line["epoch"].is_number_integer())
    throw Error("its 'epoch' is not a whole number", {Error::file});
  return {.epoch = line["epoch"].get<int>(),
          .train_loss = number(line, "train_loss"),
          .train_accuracy = number(line, "train_accuracy"),
          .test_accuracy = number(line, "test_accuracy"),
          .seconds = number(line, "seconds"),
          .data_wait = line.contains("data_wait") ? number(line, "data_wait") : 0,
          .lr = line.contains("lr") ? number(line, "lr") : 0,
          .bytes_per_step = line.contains("bytes_per_step") ? number(line, "bytes_per_step") : 0,
          .parts = parts_of(line),
          .weights = line.value("weights", std::string()),
          .test = test_of(line)};
}

// The step gives at most ten marks on the epoch axis, at round numbers.
int epoch_step(int epochs) {
  for (int power = 1;; power *= 10) {
    for (int step : {power, 2 * power, 5 * power}) {
      if (epochs <= 10 * step) return step;
    }
  }
}

double test_loss_of(const EpochMetrics& epoch) {
  const auto loss = epoch.test.find("loss");
  return loss == epoch.test.end() ? std::numeric_limits<double>::quiet_NaN() : loss->second;
}

// A curve has a column of values, a name, and a look of its line.
constexpr const char* kLossCurve = "2 title 'train loss' dashtype 1 linewidth 2 pointtype 7 linecolor rgb '#1f77b4'";
constexpr const char* kAccuracyCurves[] = {
    "3 title 'train accuracy' dashtype (12,4) linewidth 2 pointtype 5 linecolor rgb '#c2378b'",
    "4 title 'test accuracy' dashtype (12,4,2,4) linewidth 2 pointtype 9 linecolor rgb '#2a8a3a'"};
constexpr const char* kTestLossCurve =
    "5 title 'test loss' dashtype (12,4) linewidth 2 pointtype 5 linecolor rgb '#c2378b'";

// gnuplot draws no line that has no value at all.
std::vector<std::string> curves_of(const std::vector<EpochMetrics>& history) {
  const auto any = [&](const auto& value_of) {
    return std::any_of(history.begin(), history.end(),
                       [&](const auto& epoch) { return std::isfinite(value_of(epoch)); });
  };
  std::vector<std::string> curves{kLossCurve};
  if (any([](const auto& epoch) { return epoch.train_accuracy; })) {
    curves.insert(curves.end(), std::begin(kAccuracyCurves), std::end(kAccuracyCurves));
  } else if (any(test_loss_of)) {
    curves.emplace_back(kTestLossCurve);
  }
  return curves;
}

std::string script_for(const std::vector<EpochMetrics>& history, const std::string& title) {
  int first = history.front().epoch, last = history.back().epoch;
  const auto curves = curves_of(history);
  const bool counts_answers = curves.size() > 2;
  Classic<std::ostringstream> script;
  script << "$curve << END\n";
  for (const EpochMetrics& epoch : history) {
    script << epoch.epoch;
    for (double value : {epoch.train_loss, epoch.train_accuracy, epoch.test_accuracy, test_loss_of(epoch)}) {
      if (std::isfinite(value)) script << ' ' << value;
      if (!std::isfinite(value)) script << " NaN";
    }
    script << '\n';
  }
  script << "END\n";

  // A curve of one epoch is a point in the middle.
  double margin = first == last ? 0.5 : 0;
  script << "set xrange [" << first - margin << ':' << last + margin << "]\n"
         << "set xtics " << epoch_step(last) << "\n"
         << "set yrange " << (counts_answers ? "[0:1<*]" : "[*:*]") << "\n"
         << "set format y '" << (counts_answers ? "%.1f" : "%g") << "'\n";
  script << R"(
set title )"
         << io::gnuplot_string(title) << R"( noenhanced offset 0,1.4
set xlabel 'epoch' textcolor rgb '#333333'
set key at graph 0.5,1.07 center center horizontal Left reverse samplen 3.5 textcolor rgb '#333333'
set tmargin 4.6
set rmargin 3
set pointsize )"
         << (history.size() == 1 ? 1.5 : 0.5) << R"(
set style data )"
         << (history.size() <= 40 ? "linespoints" : "lines") << R"(
plot )";
  for (size_t i = 0; i < curves.size(); ++i) script << (i == 0 ? "" : ", ") << "$curve using 1:" << curves[i];
  script << "\n";
  return script.str();
}

}  // namespace

std::string metrics_text(const std::vector<EpochMetrics>& history, bool synthetic) {
  std::string text;
  for (const EpochMetrics& epoch : history) {
    Json line = {{"epoch", epoch.epoch},
                 {"train_loss", epoch.train_loss},
                 {"train_accuracy", epoch.train_accuracy},
                 {"test_accuracy", epoch.test_accuracy},
                 {"seconds", epoch.seconds},
                 {"data_wait", epoch.data_wait},
                 {"lr", epoch.lr},
                 {"bytes_per_step", epoch.bytes_per_step}};
    if (!epoch.parts.empty()) line["parts"] = epoch.parts;
    if (!epoch.weights.empty()) line["weights"] = epoch.weights;
    if (!epoch.test.empty()) line["test"] = epoch.test;
    if (synthetic) line["data"] = "synthetic";
    text += line.dump() + "\n";
  }
  return text;
}

std::vector<EpochMetrics> metrics_from(std::istream& in, const std::filesystem::path& source) {
  std::vector<EpochMetrics> history;
  std::string line;
  while (std::getline(in, line)) {
    try {
      history.push_back(parse(line));
    } catch (const std::exception& error) {
      throw Error("'" + source.string() + "', line " + std::to_string(history.size() + 1) + ": " + error.what(),
                  {Error::file});
    }
  }
  return history;
}

void write_metrics(const std::filesystem::path& file, const std::vector<EpochMetrics>& history, bool synthetic) {
  io::write_file(file, metrics_text(history, synthetic));
}

std::vector<EpochMetrics> read_metrics(const std::filesystem::path& file) {
  errno = 0;
  std::ifstream in(file);
  if (!in) throw Error("cannot read '" + file.string() + "': " + std::generic_category().message(errno), {Error::file});
  std::vector<EpochMetrics> history = metrics_from(in, file);
  if (in.bad())
    throw Error("cannot read '" + file.string() + "': " + std::generic_category().message(errno), {Error::file});
  return history;
}

void draw_curve(const std::filesystem::path& file, const std::vector<EpochMetrics>& history, const std::string& title) {
  if (history.empty()) throw Error("cannot draw '" + file.string() + "': there is no epoch to draw yet", {Error::file});
  io::draw(file, script_for(history, title));
}

}  // namespace lockstep
