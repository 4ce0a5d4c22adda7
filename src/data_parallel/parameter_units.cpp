#include "parameter_units.hpp"

#include <lockstep/base/error.hpp>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>

namespace lockstep {
namespace {

// These hold for a net whose modules are small enough, and for each rank's slice of it.
constexpr int64_t kFewestUnits = 16, kFewestOfASlice = 8;

std::string module_of(const std::string& parameter) {
  const size_t dot = parameter.rfind('.');
  return dot == std::string::npos ? "" : parameter.substr(0, dot);
}

bool is_within(const std::string& module, const std::string& unit) {
  return module == unit || module.starts_with(unit + ".");
}

void check_units(const NamedParameters& parameters, const std::vector<std::string>& units, const Rank& rank) {
  const auto refuse = [&](const std::string& unit, const std::string& why) {
    throw Error(rank.name() + ": DataParallel: DataParallelOptions::units has '" + unit + "', which " + why +
                ". Give names of modules as named_modules() has them, each once");
  };
  for (size_t i = 0; i < units.size(); ++i) {
    bool found = false;
    for (const auto& [name, parameter] : parameters) found = found || is_within(module_of(name), units[i]);
    if (!found) refuse(units[i], "is no module that has parameters that need a gradient");
    for (size_t other = 0; other < units.size(); ++other) {
      if (other != i && is_within(units[i], units[other])) refuse(units[i], "is in '" + units[other] + "' already");
    }
  }
}

// Gives the named unit that has the module; empty: none.
std::string named_unit_of(const std::string& module, const std::vector<std::string>& units) {
  for (const auto& unit : units) {
    if (is_within(module, unit)) return unit;
  }
  return "";
}

int64_t bytes_of(const NamedParameters& parameters) {
  int64_t bytes = 0;
  for (const auto& [name, parameter] : parameters) bytes += static_cast<int64_t>(parameter.nbytes());
  return bytes;
}

// A rank has two or three units whole at once. So they must be small beside its slice, also where the net is small.
int64_t most_bytes(const NamedParameters& parameters, const DataParallelOptions& options, const Rank& rank) {
  const int64_t units = std::max(kFewestUnits, kFewestOfASlice * rank.world_size());
  return std::min(options.bucket_bytes, std::max(bytes_of(parameters) / units, kLeastUnitBytes));
}

// Gives the parameters that each module has itself.
std::vector<NamedParameters> in_modules(const NamedParameters& parameters) {
  std::vector<NamedParameters> modules;
  for (const auto& parameter : parameters) {
    const bool same = !modules.empty() && module_of(modules.back()[0].first) == module_of(parameter.first);
    if (!same) modules.emplace_back();
    modules.back().push_back(parameter);
  }
  return modules;
}

}  // namespace

std::vector<NamedParameters> units_of(const NamedParameters& parameters, const DataParallelOptions& options,
                                      const Rank& rank) {
  check_units(parameters, options.units, rank);
  const int64_t most = most_bytes(parameters, options, rank);
  std::vector<NamedParameters> units;
  std::string last_unit;
  int64_t bytes = 0;  // the last unit's bytes
  for (const auto& module : in_modules(parameters)) {
    const std::string unit = named_unit_of(module_of(module[0].first), options.units);
    const int64_t more = bytes_of(module);
    const bool full = unit.empty() && bytes + more > most && bytes >= std::min(most, kLeastUnitBytes);
    if (units.empty() || unit != last_unit || full) {
      units.emplace_back();
      bytes = 0;
    }
    units.back().insert(units.back().end(), module.begin(), module.end());
    bytes += more;
    last_unit = unit;
  }
  return units;
}

std::vector<ShardedBucket> shard_in_units(const NamedParameters& parameters, const DataParallelOptions& options,
                                          const Rank& rank) {
  std::vector<ShardedBucket> buckets;
  const auto units = units_of(parameters, options, rank);
  for (auto unit = units.rbegin(); unit != units.rend(); ++unit) {
    for (auto& bucket : shard_parameters(*unit, rank, std::numeric_limits<int64_t>::max(), /*own_slices=*/true)) {
      buckets.push_back(std::move(bucket));
    }
  }
  return buckets;
}

}  // namespace lockstep
