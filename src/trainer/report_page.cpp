#include "report_page.hpp"

#include <lockstep/base/error.hpp>
#include <lockstep/trainer/report.hpp>
#include <nlohmann/json.hpp>

#include "base/classic.hpp"
#include "io/atomic_file.hpp"
#include "io/read_text.hpp"
#include "io/safetensors.hpp"
#include "metrics_text.hpp"
#include "option_table.hpp"
#include "option_text.hpp"
#include "train_options.hpp"

#include <algorithm>
#include <set>
#include <sstream>
#include <string_view>
#include <system_error>
#include <utility>

namespace lockstep {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

bool is_there(const fs::path& file) {
  std::error_code unknown;
  return fs::exists(file, unknown);
}

std::vector<fs::path> runs_of(const std::vector<fs::path>& folders) {
  std::vector<fs::path> runs;
  for (const auto& folder : folders) {
    const auto begin = static_cast<std::ptrdiff_t>(runs.size());
    if (is_there(folder / kMetricsFile)) {
      runs.push_back(folder);
      continue;
    }
    std::error_code unreadable;
    for (const auto& entry : fs::directory_iterator(folder, unreadable)) {
      if (is_there(entry.path() / kMetricsFile)) runs.push_back(entry.path());
    }
    std::sort(runs.begin() + begin, runs.end());
    if (static_cast<std::ptrdiff_t>(runs.size()) > begin) continue;
    throw Error("there is no run in '" + folder.string() + "' with a finished epoch: it has no " + kMetricsFile +
                    ", and no folder in it has one",
                {Error::file, {}, {"run_dir"}});
  }
  return runs;
}

// Gives the JSON text of a file that the report can do without, or null.
Json json_in(const fs::path& file) {
  if (!is_there(file)) return nullptr;
  Json value = Json::parse(io::read_text(file), nullptr, /*allow_exceptions=*/false);
  return value.is_object() ? value : Json();
}

std::string text_of(const Json& data) {
  return data.dump(-1, ' ', /*ensure_ascii=*/false, Json::error_handler_t::replace);
}

Json shapes_in(const fs::path& weights) {
  Json shapes = Json::object();
  try {
    for (const auto& tensor : io::read_layout(weights).tensors) shapes[tensor.name] = tensor.shape;
  } catch (const Error&) {  // without weights the report leaves out what they would show
  }
  return shapes;
}

// Takes over the lines of metrics.jsonl as they are: a long run has megabytes of them.
std::string json_of_run(const fs::path& folder, const std::string& name) {
  Classic<std::istringstream> lines(io::read_text(folder / kMetricsFile));
  metrics_from(lines, folder / kMetricsFile);  // refuses a damaged file
  std::string metrics = std::move(lines).str();
  if (!metrics.empty() && metrics.back() == '\n') metrics.pop_back();
  std::replace(metrics.begin(), metrics.end(), '\n', ',');  // within texts JSON writes a line's end as \n
  const Json run = {{"name", name},
                    {"config", json_in(folder / kConfigFile)},
                    {"notes", json_in(folder / kNotesFile)},
                    {"shapes", shapes_in(folder / kWeightsFile)}};
  return "{\"metrics\":[" + metrics + "]," + text_of(run).substr(1);
}

Json settings() {
  Json all = Json::array();
  const TrainOptions defaults;
  each_option(defaults, [&](const Option& option, const auto& value) {
    if (option.more.kept && option.group != nullptr) all.push_back({option.group, option.key, option_text(value)});
  });
  return all;
}

// No text in the page ends a script: JSON has "<" in texts alone, and there "\\u003c" means the same.
std::string within_page(const std::string& json) {
  std::string text;
  text.reserve(json.size() + json.size() / 16);
  for (const char c : json) c == '<' ? text += "\\u003c" : text += c;
  return text;
}

}  // namespace

void write_report_page(const fs::path& file, const std::vector<fs::path>& run_dirs, const Json& charts,
                       const std::string& title) {
  std::string runs;
  std::set<std::string> names;
  for (const auto& folder : runs_of(run_dirs)) {
    std::string name = fs::absolute(folder / "").lexically_normal().parent_path().filename().string();
    if (names.contains(name)) name = folder.string();
    names.insert(name);
    runs += (runs.empty() ? "" : ",") + json_of_run(folder, name);
  }
  const Json rest = {{"title", title}, {"settings", settings()}, {"charts", charts}};
  constexpr std::string_view place = "{{data}}";
  std::string page = kEmptyReport;
  page.replace(page.find(place), place.size(), within_page("{\"runs\":[" + runs + "]," + text_of(rest).substr(1)));
  io::write_file(file, page);
}

void write_report(const fs::path& file, const std::vector<fs::path>& run_dirs) {
  write_report_page(file, run_dirs, Json::array());
}

}  // namespace lockstep
