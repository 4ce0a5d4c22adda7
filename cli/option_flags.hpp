// Adds the flags of TrainOptions, one for each option of the table that has one.
#pragma once

#include <CLI/CLI.hpp>
#include <lockstep/trainer/train_options.hpp>

#include <map>
#include <optional>
#include <string>

#include "output.hpp"

namespace lockstep::cli {

// Given has the text that the user gave for each option, by the options' keys.
using Given = std::map<std::string, std::optional<std::string>>;

// Adds the flags. Their texts go to `given`; keep `given` alive longer than `app`.
void add_option_flags(CLI::App& app, Given& given);

// Puts the given texts into the options, except texts that need more than their own option. A choice resets options
// that went only with the previous choice. Throws Error for a name that does not exist, and for two choices that no
// options can have.
void take_given(const Given& given, TrainOptions& options);

// Replaces the names of options in the library's texts, such as `batch_size`, by flags: --batch-size.
std::string with_flags(std::string text);

// Prints a warning, perhaps the library's, on the standard error. Waits for a slow reader, for a while.
void print_warning(const std::string& text);
void print_warning(const std::string& text, Output& error);  // does not wait

}  // namespace lockstep::cli
