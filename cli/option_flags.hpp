// The flags of TrainOptions, one for each option of the table that has one.
#pragma once

#include <CLI/CLI.hpp>
#include <lockstep/trainer/train_options.hpp>

#include <map>
#include <optional>
#include <string>

#include "output.hpp"

namespace lockstep::cli {

// The text that was given for each option, by the options' keys.
using Given = std::map<std::string, std::optional<std::string>>;

// The flags' texts go to `given`, which must outlive `app`.
void add_option_flags(CLI::App& app, Given& given);

// Puts what was given into the options, except texts that need more than their option. A choice resets what only went
// with the choice before. Throws Error for a name that does not exist.
void take_given(const Given& given, TrainOptions& options);

// Replaces the names of options in the library's texts, such as `batch_size`, by flags: --batch-size.
std::string with_flags(std::string text);

// Prints a warning, perhaps the library's, on the standard error. Waits for who reads it, for a while.
void print_warning(const std::string& text);
void print_warning(const std::string& text, Output& error);  // does not wait

}  // namespace lockstep::cli
