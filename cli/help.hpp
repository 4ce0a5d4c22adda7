// The layout of --help: grouped, wrapped to 80 columns, with defaults, and the same for every version of CLI11.
#pragma once

#include <CLI/CLI.hpp>

#include <string>

namespace lockstep::cli {

class Help : public CLI::FormatterBase {
 public:
  std::string make_help(const CLI::App* app, std::string name, CLI::AppFormatMode mode) const override;
};

}  // namespace lockstep::cli
