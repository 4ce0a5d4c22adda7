#include "report.hpp"

#include <lockstep/base/error.hpp>
#include <lockstep/devices/device_info.hpp>

#include <algorithm>
#include <cerrno>
#include <ctime>
#include <fstream>

#include "commands.hpp"
#include "io/reason.hpp"

namespace lockstep::cli {

void BestTimes::add(const std::string& name, double seconds) {
  const auto [found, is_new] = seconds_.emplace(name, seconds);
  if (!is_new) found->second = std::min(found->second, seconds);
}

nlohmann::ordered_json circumstances(const std::string& benchmark, const Devices& devices) {
  char date[32];
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  std::strftime(date, sizeof date, "%Y-%m-%dT%H:%M:%SZ", gmtime_r(&now, &utc));
  return {{"benchmark", benchmark},        {"date", date},
          {"lockstep", version()},         {"libtorch", torch_version()},
          {"devices", to_string(devices)}, {"cpu_cores", cpu_cores()}};
}

void write_json(const std::string& file, const nlohmann::ordered_json& json) {
  std::ofstream out(file);
  out << json.dump(2) << "\n";
  if (!out.flush()) throw Error("--json " + file + ": cannot be written: " + io::reason(errno), {Error::file});
}

}  // namespace lockstep::cli
