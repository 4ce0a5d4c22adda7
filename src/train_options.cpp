#include "train_options.hpp"

#include <lockstep/error.hpp>
#include <nlohmann/json.hpp>

#include <cmath>
#include <fstream>
#include <iterator>
#include <sstream>

namespace lockstep {
namespace {

using nlohmann::json;

std::string spec_of(const Devices& devices) {
  std::string spec;
  for (const auto& device : devices) {
    if (!spec.empty()) spec += ',';
    spec += device.str();
  }
  return spec;
}

// Reads config[key] into `value` if it is there. Throws Error that names the key.
template <class Value>
void read(const json& config, const char* key, Value& value) {
  if (!config.contains(key)) return;
  try {
    value = config.at(key).get<Value>();
  } catch (const json::exception&) {
    throw Error(std::string("configuration: the value of \"") + key + "\" cannot be " + config.at(key).dump());
  }
}

}  // namespace

std::string to_json(const TrainOptions& options) {
  nlohmann::ordered_json config;
  config["model"] = options.model;
  config["data"] = options.data;
  config["data_dir"] = options.data_dir.string();
  config["devices"] = spec_of(options.devices);
  config["threads_per_rank"] = options.threads_per_rank;
  config["batch_size"] = options.batch_size;
  config["lr"] = options.lr;
  config["epochs"] = options.epochs;
  config["seed"] = options.seed;
  config["run_dir"] = options.run_dir.string();
  return config.dump(2) + "\n";
}

TrainOptions train_options_from_json(const std::string& text) {
  json config;
  try {
    config = json::parse(text);
  } catch (const json::exception& error) {
    throw Error(std::string("configuration: this is not JSON: ") + error.what());
  }
  if (!config.is_object()) throw Error("configuration: expected a JSON object, got " + config.dump());
  TrainOptions options;
  std::string data_dir, devices, run_dir;
  read(config, "model", options.model);
  read(config, "data", options.data);
  read(config, "data_dir", data_dir);
  read(config, "devices", devices);
  read(config, "threads_per_rank", options.threads_per_rank);
  read(config, "batch_size", options.batch_size);
  read(config, "lr", options.lr);
  read(config, "epochs", options.epochs);
  read(config, "seed", options.seed);
  read(config, "run_dir", run_dir);
  const json known = json::parse(to_json({}));
  for (const auto& [key, value] : config.items()) {
    if (!known.contains(key)) throw Error("configuration: unknown key \"" + key + "\"");
  }
  options.data_dir = data_dir;
  options.run_dir = run_dir;
  if (!devices.empty()) options.devices = parse_devices(devices);
  return options;
}

TrainOptions checked(TrainOptions options) {
  const auto refuse = [](const std::string& what, const auto& value, const std::string& rule) {
    std::ostringstream text;
    text << what << " is " << value << "; " << rule;
    throw Error(text.str());
  };
  if (options.model != "lenet") refuse("the model", '"' + options.model + '"', "lenet is the only one so far");
  if (options.data != "fashion-mnist" && options.data != "synthetic") {
    refuse("the data set", '"' + options.data + '"', "it must be fashion-mnist or synthetic");
  }
  if (options.batch_size < 1) refuse("the batch size", options.batch_size, "it must be at least 1");
  if (!std::isfinite(options.lr) || options.lr < 0)
    refuse("the learning rate", options.lr, "it must be a number of at least 0");
  if (options.epochs < 1) refuse("the number of epochs", options.epochs, "it must be at least 1");
  if (options.threads_per_rank < 1)
    refuse("the number of threads per rank", options.threads_per_rank, "it must be at least 1");
  if (options.devices.empty()) options.devices = default_devices();
  check_devices(options.devices);
  return options;
}

ImageData load_data(const TrainOptions& options) {
  return options.data == "synthetic" ? synthetic_images() : load_fashion_mnist(options.data_dir);
}

TrainOptions read_config(const std::filesystem::path& run_dir) {
  const auto file = run_dir / kConfigFile;
  std::ifstream stream(file);
  if (!stream) {
    throw Error(run_dir.string() + " is not the folder of a run: there is no readable " + kConfigFile +
                " in it. `lockstep train` makes one");
  }
  const std::string text{std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>()};
  try {
    return train_options_from_json(text);
  } catch (const Error& error) {
    throw Error(file.string() + ": " + error.what());
  }
}

}  // namespace lockstep
