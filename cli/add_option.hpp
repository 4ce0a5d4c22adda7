// Adds flags to commands.
#pragma once

#include <CLI/CLI.hpp>

#include <string>

namespace lockstep::cli {

// Adds flags with a value of `type` to a command. If a flag is given several times, the last one counts.
struct OptionAdder {
  CLI::App& app;

  template <class Value>
  CLI::Option* operator()(const char* name, Value& value, const char* type, const std::string& description,
                          const std::string& default_text = {}) const {
    return app.add_option(name, value, description)->type_name(type)->default_str(default_text)->take_last();
  }
};

}  // namespace lockstep::cli
