#include "parameter_units.hpp"

#include <lockstep/base/error.hpp>

#include <cstdint>
#include <limits>
#include <string>
#include <utility>

namespace lockstep {
namespace {

std::string module_of(const std::string& parameter) {
  const size_t dot = parameter.rfind('.');
  return dot == std::string::npos ? "" : parameter.substr(0, dot);
}

bool is_within(const std::string& module, const std::string& unit) {
  return module == unit || module.starts_with(unit + ".");
}

void check_units(const NamedParameters& parameters, const std::vector<std::string>& units, const Rank& rank) {
  const auto refuse = [&](const std::string& unit, const std::string& why) {
    throw Error(rank.name() + ": ShardedOptimizer: ShardedOptions::units has '" + unit + "', which " + why +
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

// The named unit that has the module; empty: none.
std::string named_unit_of(const std::string& module, const std::vector<std::string>& units) {
  for (const auto& unit : units) {
    if (is_within(module, unit)) return unit;
  }
  return "";
}

}  // namespace

std::vector<NamedParameters> units_of(const NamedParameters& parameters, const ShardedOptions& options,
                                      const Rank& rank) {
  check_units(parameters, options.units, rank);
  std::vector<NamedParameters> units;
  std::string last_module, last_unit;
  int64_t bytes = 0;  // of the last unit
  for (const auto& parameter : parameters) {
    const std::string module = module_of(parameter.first), unit = named_unit_of(module, options.units);
    const bool full = unit.empty() && bytes >= options.bucket_bytes && module != last_module;
    if (units.empty() || unit != last_unit || full) {
      units.emplace_back();
      bytes = 0;
    }
    units.back().push_back(parameter);
    bytes += static_cast<int64_t>(parameter.second.nbytes());
    last_module = module;
    last_unit = unit;
  }
  return units;
}

std::vector<ShardedBucket> shard_in_units(const NamedParameters& parameters, const ShardedOptions& options,
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
