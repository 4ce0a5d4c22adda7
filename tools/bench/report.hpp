// Code that the benches share: flags, data, the best times of several rounds, and the files that keep the figures.
#pragma once

#include <CLI/CLI.hpp>
#include <lockstep/data/data.hpp>
#include <lockstep/devices/devices.hpp>
#include <lockstep/models/models.hpp>
#include <nlohmann/json.hpp>

#include <map>
#include <string>

namespace lockstep::cli {

void add_rounds_flag(CLI::App& bench, int& rounds);
void add_json_flag(CLI::App& bench, std::string& file);

// Throws UsageError unless a text was given to gpt, or no text to another model.
void check_text_flag(const ModelOptions& model, const std::string& text);

// Gives the images that --data names. Throws UsageError for another name, and Error as load_fashion_mnist() does.
ImageData images_named(const std::string& data, const std::string& data_dir);

// Keeps the best time of each contender, by name.
class BestTimes {
 public:
  void add(const std::string& name, double seconds);
  bool has(const std::string& name) const { return seconds_.count(name) != 0; }
  double of(const std::string& name) const { return seconds_.at(name); }

 private:
  std::map<std::string, double> seconds_;
};

// Writes the figures to --json's file, after the circumstances: versions, devices, cores, the time. Does nothing
// without a file. Throws Error that names the option and the file.
void write_json(const std::string& file, const std::string& benchmark, const Devices& devices,
                const nlohmann::ordered_json& figures);

}  // namespace lockstep::cli
