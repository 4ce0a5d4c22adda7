// Adds flags that several commands share with `lockstep train`, whose help explains them.
#pragma once

#include <CLI/CLI.hpp>
#include <lockstep/devices/devices.hpp>
#include <lockstep/models/models.hpp>

#include <cstdint>
#include <optional>
#include <string>

#include "add_option.hpp"
#include "flag_checks.hpp"
#include "usage.hpp"

namespace lockstep::cli {

inline void add_devices_flag(CLI::App& app, std::optional<std::string>& list) {
  OptionAdder{app}("--devices", list, "LIST", "as for lockstep train (default: every GPU, or else every core)");
}

// Gives the devices that the flag names; default_devices() without the flag.
inline Devices devices_from(const std::optional<std::string>& list) {
  return list ? from_flags([&] { return parse_devices(*list); }) : default_devices();
}

inline void add_threads_flag(CLI::App& app, int& threads) {
  OptionAdder{app}("--threads-per-rank", threads, "N", "threads that each rank computes with", "1")
      ->check(number_between<int, 1, 1024>);
}

inline void add_model_flags(CLI::App& app, ModelOptions& model) {
  const OptionAdder add{app};
  add("--model", model.name, "NAME", "as for lockstep train", model.name)->check(known_model);
  add("--width", model.width, "X", "as for lockstep train", "1")->check(rate);
  add("--image-size", model.image_size, "N", "as for lockstep train")->check(number_between<int64_t, 1>);
  add("--groups", model.groups, "N", "as for lockstep train", "1")->check(number_between<int64_t, 1>);
  add("--dropout", model.dropout, "P", "as for lockstep train", "0.5")->check(rate);
  const auto add_size = [&](const char* flag, int64_t& size) {
    add(flag, size, "N", "as for lockstep train", std::to_string(size))->check(number_between<int64_t, 1>);
  };
  add_size("--layers", model.layers);
  add_size("--heads", model.heads);
  add_size("--embedding", model.embedding);
  add_size("--context", model.context);
  add("--residual-dropout", model.residual_dropout, "P", "as for lockstep train", "0")->check(rate);
}

}  // namespace lockstep::cli
