// Code that what measures shares: the best times of several rounds, and the files that keep them.
#pragma once

#include <lockstep/devices/devices.hpp>
#include <nlohmann/json.hpp>

#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace lockstep::cli {

// The best time of each contender, by name.
class BestTimes {
 public:
  void add(const std::string& name, double seconds);
  bool has(const std::string& name) const { return seconds_.count(name) != 0; }
  double of(const std::string& name) const { return seconds_.at(name); }

 private:
  std::map<std::string, double> seconds_;
};

// The circumstances that every report names: versions, devices, cores, the time.
nlohmann::ordered_json circumstances(const std::string& benchmark, const Devices& devices);

// Throws Error that names the option and the file.
void write_json(const std::string& file, const nlohmann::ordered_json& json);

}  // namespace lockstep::cli
