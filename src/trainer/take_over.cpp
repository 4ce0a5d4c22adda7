#include "take_over.hpp"

#include <lockstep/base/error.hpp>

#include "checkpoint_folder.hpp"
#include "io/folder_lock.hpp"
#include "train_options.hpp"

#include <filesystem>
#include <thread>

namespace lockstep {
namespace {

namespace fs = std::filesystem;

// Asks for the lock again and again, which also asks a network's file system.
void wait_for_lock(const fs::path& run, std::chrono::milliseconds patience) {
  const auto end = std::chrono::steady_clock::now() + patience;
  for (;;) {
    io::FolderLock lock;
    if (lock.take(run) || std::chrono::steady_clock::now() > end) return;  // the caller asks for the lock once more
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

// Another run's keeper may be gone too, so the text allows for it.
[[noreturn]] void refuse_unknown(const fs::path& run, const fs::path& newest) {
  throw Error(
      run.string() +
          " holds a run that this process has not trained with. If it is this job's, all who did are gone: go on "
          "from its newest checkpoint, " +
          newest.string() + ", with `resume` " + run.string() + ". Else choose another name, or move it away",
      {Error::file});
}

// The first keeper may be killed before it has met the others. Then nothing of its run is worth keeping.
void clear_what_was_begun(const fs::path& run, const TakingOver& how) {
  const fs::path newest = newest_checkpoint(run / kCheckpointFolder);
  if (!newest.empty()) refuse_unknown(run, newest);
  if (fs::exists(run / kMetricsFile) || fs::exists(run / kWeightsFile)) return;  // RunFolder refuses this folder
  wait_for_lock(run, how.patience);
  clear_run(run);
}

}  // namespace

bool take_over(std::optional<RunFolder>& folder, const TrainOptions& options, const Judge& judge,
               const TakingOver& how) {
  const fs::path& run = options.keep.run_dir;
  const bool has_run = !run.empty() && fs::exists(run / kConfigFile), is_known = how.met || how.goes_on;
  if (has_run && is_known) wait_for_lock(run, how.patience);
  if (has_run && !is_known) clear_what_was_begun(run, how);
  folder.emplace(run, (has_run && how.met) || how.goes_on, how.files);
  folder->create(options, judge, how.warn);
  return has_run && how.met;
}

}  // namespace lockstep
