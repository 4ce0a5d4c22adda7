#include <lockstep/base/error.hpp>
#include <lockstep/trainer/metrics.hpp>

#include <algorithm>
#include <cerrno>
#include <exception>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>

#include "base/number_text.hpp"
#include "io/atomic_file.hpp"
#include "io/reason.hpp"
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

// Gives four digits of a number, and null for NaN.
Json rounded(double value) {
  Json number = Json::parse(number_text(value, std::chars_format::general, 4), nullptr, /*allow_exceptions=*/false);
  return number.is_discarded() ? Json() : number;
}

std::vector<RankMetrics> ranks_of(const Json& line) {
  if (!line.contains("ranks")) return {};
  const auto column_of = [&](const char* key) {
    const Json values = line["ranks"].is_object() ? line["ranks"].value(key, Json()) : Json();
    const auto is_value = [](const Json& value) { return value.is_number() || value.is_null(); };
    if (values.is_array() && std::all_of(values.begin(), values.end(), is_value)) return values;
    throw Error("its 'ranks' has no list of numbers '" + std::string(key) + "'", {Error::file});
  };
  const Json data = column_of("data_wait"), others = column_of("rank_wait"), memory = column_of("memory");
  std::vector<RankMetrics> ranks(std::min({data.size(), others.size(), memory.size()}));
  const auto seconds = [](const Json& value) { return value.is_null() ? std::nan("") : value.get<double>(); };
  for (size_t i = 0; i < ranks.size(); ++i)
    ranks[i] = {seconds(data[i]), seconds(others[i]), memory[i].is_null() ? 0 : memory[i].get<int64_t>()};
  return ranks;
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
          .test = test_of(line),
          .ranks = ranks_of(line)};
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
    for (const RankMetrics& rank : epoch.ranks) {
      line["ranks"]["data_wait"].push_back(rounded(rank.data_wait));
      line["ranks"]["rank_wait"].push_back(rounded(rank.rank_wait));
      line["ranks"]["memory"].push_back(rank.memory);
    }
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
  if (!in) throw Error("cannot read '" + file.string() + "': " + io::reason(errno), {Error::file});
  std::vector<EpochMetrics> history = metrics_from(in, file);
  if (in.bad()) throw Error("cannot read '" + file.string() + "': " + io::reason(errno), {Error::file});
  return history;
}

}  // namespace lockstep
