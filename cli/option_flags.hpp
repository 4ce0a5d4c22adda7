// The flags of TrainOptions, one for each option of the table that has one.
#pragma once

#include <CLI/CLI.hpp>
#include <lockstep/trainer/train_options.hpp>

#include <map>
#include <optional>
#include <string>

namespace lockstep::cli {

// What was given of the options, by their keys, as text.
using Given = std::map<std::string, std::optional<std::string>>;

// Its values go to `given`, which must outlive `app`.
void add_option_flags(CLI::App& app, Given& given);

// Those that were given, in place of what the options have, but for texts that need more than their option. A choice
// takes back what only went with the one before it. Throws Error: a name that is not there.
void take_given(const Given& given, TrainOptions& options);

// Names of options as the library's texts have them, `batch_size`, turned into flags: --batch-size.
std::string with_flags(std::string text);

// Prints a warning, perhaps the library's, on the standard error.
void print_warning(const std::string& text);

}  // namespace lockstep::cli
