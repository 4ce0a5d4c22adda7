#include "resume.hpp"

#include <lockstep/base/error.hpp>
#include <lockstep/ranks/rank.hpp>
#include <lockstep/trainer/metrics.hpp>

#include <map>
#include <string_view>
#include <system_error>

#include "batch_settings.hpp"
#include "checkpoint_folder.hpp"
#include "devices/processor_kind.hpp"
#include "option_table.hpp"
#include "option_text.hpp"
#include "run_folder.hpp"
#include "train_options.hpp"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

// Has two settings of an option that must not change while a run goes on.
struct Change {
  std::string key, then, now;
};

// Gives the first change; none if both are settings of one run.
std::optional<Change> change_between(const TrainOptions& old, const TrainOptions& options) {
  std::map<std::string_view, std::string> then;
  each_option(old, [&](const Option& option, const auto& value) { then[option.key] = option_text(value); });
  std::optional<Change> change;
  each_option(options, [&](const Option& option, const auto& value) {
    // With a grain a run keeps its bits, which another memory format would round otherwise.
    const bool counts =
        option.same == Same::throughout || (options.batch.grain && std::string_view(option.key) == "memory_format");
    if (change || !counts || !says_something(option, options) || then[option.key] == option_text(value)) return;
    change = {option.key, then[option.key], option_text(value)};
  });
  return change;
}

// Reads the config.json of the folder in which the checkpoint lies. An unreadable file gives none, and the run that
// goes on writes it anew.
std::optional<TrainOptions> config_beside(const fs::path& file, const Devices& devices) {
  const fs::path run = run_of(file);
  if (run.empty()) return std::nullopt;
  try {
    return read_config(run, devices);
  } catch (const Error&) {
    return std::nullopt;
  }
}

void check_same_run(const RunState& state, const TrainOptions& options, const fs::path& file) {
  const std::string what = "cannot go on from '" + file.string() + "': ";
  TrainOptions then;
  try {  // takes the defaults of keys that are newer than the checkpoint
    then = train_options_from_json(state.config, options.devices);
  } catch (const Error& error) {
    throw Error(what + error.what(), {Error::file});
  }
  const auto config = config_beside(file, options.devices);
  if (const auto change = config ? change_between(*config, then) : std::nullopt) {
    throw Error(what + "it has " + change->key + " " + change->now + ", and the run in whose folder it lies " +
                    change->then + ", as its " + kConfigFile +
                    " says; so it is another run's, or that file was changed. Go on from a checkpoint of this run; a "
                    "file that was changed, put back or remove",
                {Error::file, {}, {change->key}});
  }
  if (const auto change = change_between(then, options)) {
    throw Error(what + "its run has " + change->key + " " + change->then + ", and this one " + change->now +
                    "; a run goes on as it began",
                {.options = {change->key}});
  }
  if (options.epochs < state.epochs || (options.epochs == state.epochs && state.steps > 0)) {
    throw Error(what + "it is " + std::to_string(state.steps) + " steps after epoch " + std::to_string(state.epochs) +
                    ", and this run is to have " + std::to_string(options.epochs) + " epochs",
                {.options = {"epochs"}});
  }
}

// Tells whether the run was killed before its first checkpoint, which follows the first epoch's other files. Then
// nothing of it is worth keeping, unless the run keeps no checkpoints, or was to have one epoch only.
bool was_killed_early(const TrainOptions& options) {
  if (!fs::exists(options.keep.run_dir / kConfigFile)) return false;
  if (!fs::exists(options.keep.run_dir / kMetricsFile)) return true;
  const TrainOptions killed = read_config(options.keep.run_dir, options.devices);
  return killed.keep.checkpoints && killed.epochs > 1 && read_metrics(options.keep.run_dir / kMetricsFile).size() == 1;
}

}  // namespace

TrainOptions with_resume_found(TrainOptions options, const Warn& warn) {
  KeepOptions& keep = options.keep;
  if (keep.resume != "auto") return options;
  if (keep.run_dir.empty())
    throw Error("`resume` auto goes on with the run in `run_dir`, and there is none; give one",
                {.options = {"resume"}});
  const bool can_go_on = !newest_checkpoint(keep.run_dir / kCheckpointFolder).empty();
  keep.resume = can_go_on ? keep.run_dir : fs::path();
  if (can_go_on || this_process().index != 0 || !was_killed_early(options)) return options;
  if (fs::exists(keep.run_dir / kMetricsFile)) {
    warn(keep.run_dir.string() +
         " holds one finished epoch and no checkpoint to go on from, so the run begins anew in its place");
  }
  clear_run(keep.run_dir);
  return options;
}

fs::path checkpoint_of(const fs::path& file_or_run, const Warn& warn) {
  std::error_code error;
  const auto status = fs::status(file_or_run, error);
  if (!fs::exists(status))
    throw Error("there is no run, and no checkpoint, '" + file_or_run.string() + "'", {Error::file});
  if (!fs::is_directory(status)) return file_or_run;
  const fs::path whole = checkpoint_to_go_on(file_or_run / kCheckpointFolder, warn);
  if (!whole.empty()) return whole;
  throw Error("'" + file_or_run.string() + "' has no checkpoint that a run could go on from (it would be in " +
                  kCheckpointFolder + "/)",
              {Error::file});
}

fs::path run_of(const fs::path& checkpoint) {
  const fs::path folder = fs::absolute(checkpoint).parent_path();
  if (folder.filename() != kCheckpointFolder) return {};
  return checkpoint.parent_path().has_parent_path() ? checkpoint.parent_path().parent_path() : folder.parent_path();
}

fs::path run_to_go_on(const fs::path& file_or_run) {
  std::error_code error;
  return fs::is_directory(file_or_run, error) ? file_or_run : run_of(file_or_run);
}

fs::path last_run(const fs::path& runs_dir) {
  fs::path last;
  fs::file_time_type time;
  std::error_code error;
  for (const auto& run : fs::directory_iterator(runs_dir, error)) {
    const fs::path newest = newest_checkpoint(run.path() / kCheckpointFolder);
    if (newest.empty()) continue;
    const auto written = fs::last_write_time(newest, error);
    if (!last.empty() && written <= time) continue;
    last = run.path();
    time = written;
  }
  if (last.empty()) throw Error("no run in '" + runs_dir.string() + "' has a checkpoint to go on from", {Error::file});
  return last;
}

std::optional<RunState> resumed_state(const TrainOptions& options, const Warn& warn) {
  if (options.keep.resume.empty()) return std::nullopt;
  const fs::path file = checkpoint_of(options.keep.resume, warn);
  RunState state = read_checkpoint(file);
  check_same_run(state, options, file);
  const std::string here = processor_kind(options.devices[0]);
  if (!state.processor.empty() && !here.empty() && state.processor != here) {
    warn("'" + file.string() + "' was written on another kind of processor, " + state.processor + "; this one is " +
         here + ". It rounds otherwise, so the run goes on to other bits than it would have there");
  }
  return state;
}

void check_fits(const RunState& state, const TrainOptions& options, int64_t samples, const std::string& source,
                const DataDigests& digests) {
  const std::string what = "cannot go on from '" + options.keep.resume.string() + "': ";
  for (const auto& part : kDataParts) {
    if (!state.data || (*state.data).*part.digest == digests.*part.digest) continue;
    throw Error(what + "its run's " + part.name + " have the SHA-256 " + (*state.data).*part.digest +
                    ", and those in " + source + " " + digests.*part.digest +
                    "; a run goes on with its own data, so give their folder, or begin a new run",
                {Error::file, {}, {part.key}});
  }
  const int64_t batch = options.batch.global();
  const int64_t in_epoch = (samples_of_epoch(options.batch, samples) + batch - 1) / batch;
  if (state.steps > in_epoch) {
    throw Error(what + "it is " + std::to_string(state.steps) + " steps after an epoch's end, and an epoch of " +
                    std::to_string(samples) + " samples has " + std::to_string(in_epoch),
                {Error::file});
  }
  if (state.history.size() != static_cast<size_t>(state.epochs)) {
    throw Error(what + "it is of epoch " + std::to_string(state.epochs) + ", and has the metrics of " +
                    std::to_string(state.history.size()),
                {Error::file});
  }
}

}  // namespace lockstep
