// Has the flags of `lockstep train`, and makes options of them, a configuration file and the defaults.
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
  std::string config;  // the configuration file; empty: none
  std::string recipe;  // "fast"; empty: none
  std::string runs_dir = "runs";
  std::optional<std::string> name;
  std::string progress = "auto";

  // Gives the text that the user gave for an option. text() gives "" if there is none.
  std::optional<std::string> of(const char* key) const;
  std::string text(const char* key) const { return of(key).value_or(""); }
  std::string plan() const { return text("split"); }     // file, "auto" or "none"; empty: --config or --resume decides
  std::string resume() const { return text("resume"); }  // "last", "auto", a run or a checkpoint; empty: none
};

void add_flags(CLI::App& app, TrainFlags& flags);

// Adds up all options. Later ones override earlier ones: the defaults; --config's file, or the options of --resume's
// run; --plan's file; --recipe's settings; the flags that were given. Devices are resolved, and paths of data are
// absolute. run_dir is --name's folder, or the resumed run's, or new_run_dir's. With --plan auto, plan_here() measures
// later. Throws UsageError for a flag, Error for a file.
TrainOptions to_options(const TrainFlags& flags);

// Gives a folder for a run without --name that does not exist yet. A run that starts at the same time may choose the
// same folder.
std::filesystem::path new_run_dir(const TrainFlags& flags, const TrainOptions& options);

// Gives the mode that --progress means for this output. Throws UsageError for an unknown word.
ProgressMode progress_mode(const std::string& word, int fd);

}  // namespace lockstep::cli
