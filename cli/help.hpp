// Lays out --help: grouped, wrapped to 80 columns, with defaults, and alike for every version of CLI11. A command with
// very many flags shows the flags that a newcomer needs; --help-all shows all.
#pragma once

#include <CLI/CLI.hpp>

#include <string>
#include <utility>
#include <vector>

namespace lockstep::cli {

class Help : public CLI::FormatterBase {
 public:
  Help() = default;
  // --help shows the first lines of only the flags `first`, with a footer of their own.
  Help(std::vector<std::string> first, std::string footer)
      : first_(std::move(first)), first_footer_(std::move(footer)) {}

  std::string make_help(const CLI::App* app, std::string name, CLI::AppFormatMode mode) const override;

 private:
  std::vector<std::string> first_;
  std::string first_footer_;
};

}  // namespace lockstep::cli
