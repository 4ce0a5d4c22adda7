#include "run_folder.hpp"

#include <lockstep/base/error.hpp>
#include <lockstep/nn/weights.hpp>
#include <lockstep/trainer/report.hpp>

#include "checkpoint_folder.hpp"
#include "flat_options.hpp"
#include "io/atomic_file.hpp"
#include "io/links.hpp"
#include "train_options.hpp"

#include <algorithm>
#include <exception>
#include <iterator>
#include <map>
#include <string_view>
#include <system_error>
#include <utility>

namespace lockstep {
namespace fs = std::filesystem;

namespace {

constexpr std::chrono::seconds kReportInterval{5};  // short epochs would otherwise have more reports than steps
constexpr const char* run_files[] = {kConfigFile, kMetricsFile, kWeightsFile,
                                     kNotesFile,  kReportFile,  kCheckpointFolder};

Error exists(const fs::path& folder, const char* name) {
  std::error_code ignored;
  if (name == std::string_view(kConfigFile) && !fs::exists(folder / kMetricsFile, ignored)) {
    return Error(folder.string() + " already holds a run's " + name +
                     ", but no finished epoch: the run has just begun, or was killed. If nobody works there any more, "
                     "remove the folder; or choose another name",
                 {Error::file, {}, {"run_dir"}});
  }
  return Error(folder.string() + " already holds a run's " + name + "; choose another name, or move it away",
               {Error::file, {}, {"run_dir"}});
}

Error cannot_make(const fs::path& folder, const std::error_code& error) {
  return Error("cannot make the run's folder " + folder.string() + ": " + error.message(), {Error::file});
}

}  // namespace

void clear_run(const fs::path& folder) {
  io::FolderLock lock;
  if (!lock.take(folder))
    throw Error("another process trains in " + folder.string() + "; " + lock.advice(), {Error::file});
  if (!lock.doubt().empty()) {
    throw Error(lock.doubt() +
                    ", so a process may still train there. It holds nothing that a run could go on from: if "
                    "none trains there, remove it, or move it away",
                {Error::file});
  }
  for (auto name = std::rbegin(run_files); name != std::rend(run_files); ++name) fs::remove_all(folder / *name);
}

RunFolder::RunFolder(fs::path folder, bool goes_on, io::FileSystem& files)
    : folder_(std::move(folder)), goes_on_(goes_on), files_(files), kept_(goes_on) {
  if (folder_.empty() || goes_on) return;
  for (const char* name : run_files) {
    std::error_code error;
    const fs::file_type type = fs::symlink_status(folder_ / name, error).type();
    if (type == fs::file_type::none) throw cannot_make(folder_, error);
    if (type != fs::file_type::not_found) throw exists(folder_, name);
  }
}

RunFolder::~RunFolder() {
  if (kept_) return;
  std::error_code ignored;
  if (claimed_) {
    for (const char* name : run_files) fs::remove(folder_ / name, ignored);
    lock_.remove_file();
  }
  for (auto folder = made_.rbegin(); folder != made_.rend(); ++folder) fs::remove(*folder, ignored);
}

void RunFolder::create(const TrainOptions& options, const Judge& judge, Warn warn) {
  if (folder_.empty()) return;
  synthetic_ = std::holds_alternative<SyntheticImages>(options.data);
  keep_last_ = flat(options).keep_last;
  judge_ = judge;
  warn_ = std::move(warn);
  config_ = to_json(options);
  if (const auto error = io::make_folders(folder_, &made_)) throw cannot_make(folder_, error);
  if (!goes_on_) {
    claimed_ = io::create_file(folder_ / kConfigFile);
    if (!claimed_) throw exists(folder_, kConfigFile);
  }
  if (!lock_.take(folder_)) {
    claimed_ = false;  // another process took this one for gone, and has the files now
    throw Error("another process trains in " + folder_.string() + "; " + lock_.advice(), {Error::file});
  }
  if (warn_ && !lock_.doubt().empty())
    warn_(lock_.doubt() + ", so a second run in it may not be refused: begin none there before this one has ended");
  remove_temporaries();
  io::write_file(folder_ / kConfigFile, config_);
}

// Removes the files that killed processes left. Nobody else writes here while we hold the lock.
void RunFolder::remove_temporaries() {
  std::error_code ignored;
  for (const auto& temporary : io::temporaries_in(folder_)) {
    const std::string name = temporary.filename().string();
    const auto is_of = [&](const char* file) { return name.starts_with("." + std::string(file) + "."); };
    if (std::any_of(std::begin(run_files), std::end(run_files), is_of)) fs::remove(temporary, ignored);
  }
}

void RunFolder::take(RunNotes& notes) {
  notes_ = &notes;
  if (goes_on_) notes.take(folder_ / kNotesFile);
}

void RunFolder::write(const std::vector<EpochMetrics>& history, const torch::nn::Module& module) {
  if (folder_.empty()) return;
  const std::map<std::string, std::string> synthetic = {{"data", "synthetic"}};
  save_weights(folder_ / kWeightsFile, module, synthetic_ ? synthetic : std::map<std::string, std::string>());
  write_metrics(folder_ / kMetricsFile, history, synthetic_);  // this tells readers that the epoch's weights are there
  has_weights_ = true;
  kept_ = true;
  restore_config();
  const auto now = std::chrono::steady_clock::now();
  if (reported_ && now - *reported_ < kReportInterval) return;
  report();
  reported_ = now;
}

void RunFolder::keep(const RunState& state) {
  if (folder_.empty()) return;
  CheckpointFolder(folder_ / kCheckpointFolder, keep_last_, files_, judge_).write(state);
  kept_ = true;
}

void RunFolder::finish(const std::vector<EpochMetrics>& history) {
  if (folder_.empty()) return;
  for (const fs::path& file : {kept_ ? folder_ : fs::path(), has_weights_ ? folder_ / kWeightsFile : fs::path()}) {
    std::error_code ignored;
    if (file.empty() || fs::exists(file, ignored)) continue;
    throw Error(
        file.string() +
            " is gone: somebody removed it or moved it away while the run trained, so the run is not kept there",
        {Error::file});
  }
  if (kept_) restore_config();
  if (!history.empty()) report();
}

// Without config.json nobody could evaluate the run, or run it again.
void RunFolder::restore_config() {
  std::error_code ignored;
  if (fs::exists(folder_ / kConfigFile, ignored)) return;
  io::write_file(folder_ / kConfigFile, config_);
  if (warn_) warn_((folder_ / kConfigFile).string() + " was removed while the run trained, and is written again");
}

// The report only shows what other files hold, so it ends no run.
void RunFolder::report() {
  try {
    if (notes_ != nullptr) io::write_file(folder_ / kNotesFile, notes_->text());
    write_report(folder_ / kReportFile, {folder_});
  } catch (const std::exception& error) {
    if (warn_) warn_("the run's report could not be written: " + std::string(error.what()));
  }
}

}  // namespace lockstep
