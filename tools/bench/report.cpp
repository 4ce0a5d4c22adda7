#include "report.hpp"

#include <lockstep/base/error.hpp>
#include <lockstep/devices/device_info.hpp>
#include <lockstep/trainer/train_options.hpp>

#include <algorithm>
#include <cerrno>
#include <ctime>
#include <fstream>

#include "cli/add_option.hpp"
#include "cli/commands.hpp"
#include "cli/flag_checks.hpp"
#include "cli/usage.hpp"
#include "io/reason.hpp"

namespace lockstep::cli {

void add_rounds_flag(CLI::App& bench, int& rounds) {
  OptionAdder{bench}("--rounds", rounds, "N", "how often to measure each, in turns; the best counts",
                     std::to_string(rounds))
      ->check(number_between<int, 1>);
}

void add_json_flag(CLI::App& bench, std::string& file) {
  OptionAdder{bench}("--json", file, "FILE", "also write the figures as JSON");
}

void check_text_flag(const ModelOptions& model, const std::string& text) {
  if (learns_text(model) != text.empty()) return;
  throw UsageError(text.empty() ? "gpt learns from a text; give one with --text" : "--text is for --model gpt");
}

ImageData images_named(const std::string& data, const std::string& data_dir) {
  if (data == "synthetic") return synthetic_images();
  if (data == "fashion-mnist") return load_fashion_mnist(data_dir);
  throw UsageError("--data \"" + data + "\": it must be fashion-mnist or synthetic");
}

void BestTimes::add(const std::string& name, double seconds) {
  const auto [found, is_new] = seconds_.emplace(name, seconds);
  if (!is_new) found->second = std::min(found->second, seconds);
}

void write_json(const std::string& file, const std::string& benchmark, const Devices& devices,
                const nlohmann::ordered_json& figures) {
  if (file.empty()) return;
  char date[32];
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  std::strftime(date, sizeof date, "%Y-%m-%dT%H:%M:%SZ", gmtime_r(&now, &utc));
  nlohmann::ordered_json json = {{"benchmark", benchmark},        {"date", date},
                                 {"lockstep", version()},         {"libtorch", torch_version()},
                                 {"devices", to_string(devices)}, {"cpu_cores", cpu_cores()}};
  json.update(figures);
  std::ofstream out(file);
  out << json.dump(2) << "\n";
  if (!out.flush()) throw Error("--json " + file + ": cannot be written: " + io::reason(errno), {Error::file});
}

}  // namespace lockstep::cli
