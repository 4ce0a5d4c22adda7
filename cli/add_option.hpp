// Helpers by which commands add their flags.
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

// The same, under the heading `group` of the help.
template <class Value>
CLI::Option* add_option(CLI::App& app, const char* name, Value& value, const char* type, const std::string& description,
                        const std::string& group, const std::string& default_text = {}) {
  return OptionAdder{app}(name, value, type, description, default_text)->group(group);
}

}  // namespace lockstep::cli
