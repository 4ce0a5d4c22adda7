#include "train_flags.hpp"

#include <lockstep/base/error.hpp>
#include <lockstep/ranks/rank.hpp>

#include <algorithm>
#include <cerrno>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "add_option.hpp"
#include "flag_checks.hpp"
#include "io/reason.hpp"
#include "run_name.hpp"
#include "terminal.hpp"
#include "text.hpp"
#include "train_plan.hpp"
#include "trainer/checkpoint_folder.hpp"
#include "trainer/flat_options.hpp"
#include "trainer/option_table.hpp"
#include "trainer/resume.hpp"
#include "trainer/train_options.hpp"
#include "usage.hpp"

namespace lockstep::cli {

namespace fs = std::filesystem;

namespace {

// `what` names the file in errors.
TrainOptions parse_options(const std::string& text, const Devices& devices, const std::string& what) {
  try {
    const TrainOptions options = train_options_from_json(text, devices);
    TrainOptions what_stays = options;  // flags may still change the other options
    what_stays.way = Averaged();
    what_stays.cuda_graph = false;
    what_stays.sync_batchnorm = false;
    what_stays.batch.balance = EqualParts();
    checked(what_stays);
    return options;
  } catch (const Error& error) {
    throw Error(what + ": " + error.what(), error.data());
  }
}

TrainOptions read_options(const fs::path& file, const Devices& devices) {
  std::ostringstream text;
  errno = 0;
  std::ifstream stream(file);
  // A folder can be opened, but not read.
  if (!stream || !(text << stream.rdbuf())) {
    throw Error("--config " + file.string() + ": cannot be read: " +
                    (errno ? io::reason(errno) : std::string("it is empty")) + "; it takes a run's config.json",
                {Error::file});
  }
  return parse_options(text.str(), devices, "--config " + file.string());
}

// Gives "" for "auto" if there is no run to go on with: then a new one begins.
std::string what_to_resume(const TrainFlags& flags) {
  if (flags.resume() != "auto") return flags.resume();
  if (!flags.name) throw UsageError("--resume auto needs --name: that run goes on, or else begins");
  const fs::path run = fs::path(flags.runs_dir) / *flags.name;
  return newest_checkpoint(run / kCheckpointFolder).empty() ? "" : run.string();
}

void warn(const std::string& text) {
  if (this_process().index == 0) print_warning(text);
}

// Finds the checkpoint that "last" means in --runs-dir, or in the run --name there.
fs::path resumed_checkpoint(const TrainFlags& flags, const std::string& resume) {
  if (resume != "last") return checkpoint_of(resume, warn);
  return checkpoint_of(flags.name ? fs::path(flags.runs_dir) / *flags.name : last_run(flags.runs_dir), warn);
}

// Reads the options of the checkpoint's run.
TrainOptions resumed_options(const fs::path& checkpoint, const Devices& devices) {
  TrainOptions options = parse_options(read_checkpoint(checkpoint).config, devices, "--resume " + checkpoint.string());
  options.keep.resume = checkpoint;
  options.keep.run_dir = run_of(checkpoint);
  return options;
}

void check_name(const std::string& name) {
  if (name.empty() || name.starts_with('.') ||
      name.find('/') != std::string::npos) {  // hidden files are lockstep's own
    throw UsageError("--name \"" + name +
                     "\": it must be the name of a folder, without \"/\" and no \".\" in front; --runs-dir says where");
  }
  if (std::any_of(name.begin(), name.end(), [](unsigned char c) { return c < ' ' || c == 127; })) {
    throw UsageError(
        "--name: it must have no line breaks or other control characters, which would garble what shows it");
  }
}

// Gives the flags with those that --recipe stands for. docs/results/2026-11-29-race.md says how it was found.
Given with_recipe(const TrainFlags& flags) {
  if (flags.recipe.empty()) return flags.given;
  if (flags.recipe != "fast") throw UsageError("--recipe \"" + flags.recipe + "\": there is no recipe but fast");
  Given given = flags.given;
  for (const auto& [key, text] : {std::pair{"batch_size", "60"},
                                  {"optimizer", "adam"},
                                  {"lr", "0.018"},
                                  {"warmup", "0.1"},
                                  {"schedule", "cosine"},
                                  {"epochs", "1"}}) {
    if (!given[key]) given[key] = text;
  }
  return given;
}

}  // namespace

std::optional<std::string> TrainFlags::of(const char* key) const {
  const auto found = given.find(key);
  return found == given.end() ? std::nullopt : found->second;
}

void add_flags(CLI::App& app, TrainFlags& flags) {
  add_option_flags(app, flags.given);
  namespace groups = option_groups;
  const OptionAdder add{app};
  add("--config", flags.config, "FILE", "run again with the settings in a run's config.json; other flags override them")
      ->group(groups::what)
      ->check(not_empty);
  add("--recipe", flags.recipe, "NAME",
      "fast: settings by which lenet took the fewest seconds to a test accuracy of 0.85: " +
          with_flags("batches of 60, adam with `lr` 0.018, `warmup` 0.1 and `schedule` cosine, 1 epoch") +
          "; other flags override them")
      ->group(groups::update)
      ->check(not_empty);
  add("--runs-dir", flags.runs_dir, "DIR", "folder of all runs", flags.runs_dir)->group(groups::out)->check(not_empty);
  add("--name", flags.name, "NAME",
      "folder of this run in --runs-dir, which must not hold another run (default: date, time, model and devices)")
      ->group(groups::out);
  add("--progress", flags.progress, "MODE",
      "how progress is shown\n"
      "auto: bar on a terminal, lines elsewhere\n"
      "bar: a progress bar, if the output is a terminal, and a line per finished epoch\n"
      "lines: a line per finished epoch\n"
      "none: the settings and the result only\n",
      flags.progress)
      ->group(groups::out);
}

TrainOptions to_options(const TrainFlags& flags) {
  Devices devices = flags.of("devices") ? from_flags([&] { return parse_devices(flags.text("devices")); }) : Devices();
  std::optional<Plan> plan;
  if (!flags.plan().empty() && flags.plan() != "auto" && flags.plan() != "none") {
    try {
      plan = read_plan(flags.plan());
    } catch (const Error& error) {
      throw Error(std::string("--plan: ") + error.what(), error.data());
    }
    if (!flags.of("devices")) devices = devices_of(*plan, flags.plan());
  }
  if (!flags.resume().empty() && !flags.config.empty()) {
    throw UsageError("--resume goes on with a run's own settings, so that --config cannot go with it");
  }
  TrainOptions options;
  if (!flags.config.empty()) options = read_options(flags.config, devices);
  if (flags.name) check_name(*flags.name);
  const std::string resume = what_to_resume(flags);
  if (!resume.empty()) options = resumed_options(resumed_checkpoint(flags, resume), devices);
  const fs::path resumed_run = resume.empty() ? fs::path() : options.keep.run_dir;
  if (plan) options.batch.size = plan->batch_size;
  if (!flags.plan().empty()) set_split({}, options);
  const bool has_split = flat(options).split.has_value();
  const auto check = [&](const auto& action) {
    try {
      from_flags([&] { return action(), 0; });
    } catch (const UsageError& error) {
      const auto& keys = error.options();
      if (!has_split || std::find(keys.begin(), keys.end(), "split") == keys.end()) throw;
      throw UsageError((flags.config.empty() ? "--resume " + flags.resume() : "--config " + flags.config) +
                           " splits the network, and that does not fit here: " + error.what() +
                           ". --plan none splits it by data alone, --plan auto anew",
                       {.options = keys});
    }
  };
  check([&] { take_given(with_recipe(flags), options); });
  if (!flags.recipe.empty() && options.model.name != "lenet") {
    throw UsageError("--recipe " + flags.recipe + " was found for lenet, and not for " + options.model.name +
                     "; leave it out");
  }
  if (!devices.empty()) options.devices = devices;
  fill_defaults(options);

  if (plan) {
    check([&] { check_model(options.model); });  // follow() makes one
    follow(*plan, flags.plan(), options);
  }
  check([&] { checked(options); });
  // Absolute paths let the run's config.json mean the same in every folder.
  auto* const images = std::get_if<FashionMnist>(&options.data);
  if (images != nullptr && !images->folder.empty()) images->folder = fs::absolute(images->folder);
  if (auto* const text = std::get_if<TextFile>(&options.data)) text->file = fs::absolute(text->file);

  options.keep.run_dir = flags.name             ? fs::path(flags.runs_dir) / *flags.name
                         : !resumed_run.empty() ? resumed_run
                                                : new_run_dir(flags, options);
  return options;
}

fs::path new_run_dir(const TrainFlags& flags, const TrainOptions& options) {
  const std::string what =
      options.model.name + (std::holds_alternative<SyntheticImages>(options.data) ? "_synthetic" : "");
  return flags.runs_dir / fs::path(new_run_name(flags.runs_dir, std::time(nullptr), what, options.devices));
}

ProgressMode progress_mode(const std::string& word, int fd) {
  if (word == "auto") return can_redraw(fd) ? ProgressMode::bar : ProgressMode::lines;
  if (word == "bar") return is_terminal(fd) ? ProgressMode::bar : ProgressMode::lines;
  if (word == "lines") return ProgressMode::lines;
  if (word == "none") return ProgressMode::none;
  throw UsageError("--progress \"" + word + "\": it must be auto, bar, lines or none");
}

}  // namespace lockstep::cli
