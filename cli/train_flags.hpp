// The flags of `lockstep train`, and the options that they, a configuration file and the defaults add up to.
#pragma once

#include <CLI/CLI.hpp>
#include <lockstep/trainer/trainer.hpp>

#include <filesystem>
#include <optional>
#include <string>

#include "option_flags.hpp"

namespace lockstep::cli {

enum class ProgressMode { bar, lines, none };

struct TrainFlags {
  Given given;
  std::string config;  // empty: none
  std::string runs_dir = "runs";
  std::optional<std::string> name;
  std::string progress = "auto";

  // What was given of an option; text() has "" for nothing.
  std::optional<std::string> of(const char* key) const;
  std::string text(const char* key) const { return of(key).value_or(""); }
  std::string plan() const { return text("split"); }     // a file, "auto" or "none"; empty: as the configuration says
  std::string resume() const { return text("resume"); }  // "last", "auto", a run or a checkpoint; empty: none
};

void add_flags(CLI::App& app, TrainFlags& flags);

// Defaults, overridden by --config's file or by what --resume's run has, by --plan's file, by the flags that were
// given; devices are resolved, paths of data are absolute, and run_dir is --name's folder, or the resumed run's, or
// else new_run_dir's. With --plan auto, what is to be measured is left to plan_here(). Throws UsageError for a flag,
// Error for a file.
TrainOptions to_options(const TrainFlags& flags);

// A folder for a run without --name that is not there yet; a run that starts at the same time may choose the same one.
std::filesystem::path new_run_dir(const TrainFlags& flags, const TrainOptions& options);

// What --progress means for this output. Throws UsageError for a word that it does not know.
ProgressMode progress_mode(const std::string& word, int fd);

}  // namespace lockstep::cli
