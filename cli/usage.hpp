// Explains the words of a command line that cannot be understood, and names the help that says more.
#pragma once

#include <CLI/CLI.hpp>
#include <lockstep/base/error.hpp>

#include <string>
#include <vector>

namespace lockstep::cli {

// Says that a flag's value makes no sense, which shows only after the command line was read.
class UsageError : public Error {
 public:
  using Error::Error;
};

// Returns function(). Its Errors are about a flag's value, and become UsageErrors.
template <class Function>
auto from_flags(Function&& function) {
  try {
    return function();
  } catch (const Error& error) {
    throw UsageError(error.what(), {.options = error.options()});
  }
}

// Explains the mistake in `words`, the command line without the program's name. Suggests a correction if one is near.
std::string explain(const CLI::App& program, const CLI::ParseError& error, const std::vector<std::string>& words);

// Checks --model for CLI11: gives "" for a model's name. Otherwise lists the names, and suggests one if it is near.
std::string known_model(const std::string& name);

// Gives "lockstep train --help shows what there is."
std::string which_help(const CLI::App& program);

}  // namespace lockstep::cli
