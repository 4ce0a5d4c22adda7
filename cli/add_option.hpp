// How `lockstep train` adds each of its flags.
#pragma once

#include <CLI/CLI.hpp>

#include <string>

namespace lockstep::cli {

// A flag with a value of `type`, under the heading `group` of the help; the last one of several holds.
template <class Value>
CLI::Option* add_option(CLI::App& app, const char* name, Value& value, const char* type, const std::string& description,
                        const std::string& group, const std::string& default_text = {}) {
  return app.add_option(name, value, description)
      ->type_name(type)
      ->group(group)
      ->default_str(default_text)
      ->take_last();
}

// What was given; otherwise the value stays.
template <class Given, class Value>
void override_with(const Given& flag, Value& value) {
  if (flag) value = *flag;
}

}  // namespace lockstep::cli
