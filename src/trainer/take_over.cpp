#include "take_over.hpp"

#include <lockstep/base/error.hpp>

#include "base/seconds.hpp"
#include "checkpoint_folder.hpp"
#include "io/folder_lock.hpp"
#include "train_options.hpp"

#include <filesystem>
#include <thread>
#include <utility>

namespace lockstep {
namespace {

namespace fs = std::filesystem;

void wait_for_lock(const fs::path& run, const TakingOver& how) {
  using Clock = std::chrono::steady_clock;
  using namespace std::chrono_literals;
  constexpr auto kBeforeItIsSaid = 1s;
  const auto begin = Clock::now();
  for (bool said = false;;) {
    io::FolderLock lock;
    const auto waited = Clock::now() - begin;
    if (lock.take(run) || waited > how.patience) return;  // then the lock is asked for once more
    if (how.stop.stop_requested()) throw Stopped("stopped by request");
    if (waited > kBeforeItIsSaid && !std::exchange(said, true)) {
      how.warn(run.string() +
               " is locked by a process that the others have gone on without. Its machine stands still, or "
               "is not reached. The job waits until it gives the lock back, for " +
               comm::seconds(how.patience) + " at most");
    }
    std::this_thread::sleep_for(said ? 50ms : 1ms);  // a network's file system is asked each time
  }
}

// Another run's keeper may be gone too, so the text allows for it.
[[noreturn]] void refuse_unknown(const fs::path& run, const fs::path& newest) {
  throw Error(run.string() +
              " holds a run that this process has not trained with. If it is this job's, all who did are gone: go on "
              "from its newest checkpoint, " +
              newest.string() + ", with `resume` " + run.string() + ". Else choose another name, or move it away");
}

// The first keeper may be killed before it has met the others. Nothing of its run is worth keeping then.
void clear_what_was_begun(const fs::path& run, const TakingOver& how) {
  const fs::path newest = newest_checkpoint(run / kCheckpointFolder);
  if (!newest.empty()) refuse_unknown(run, newest);
  if (fs::exists(run / kMetricsFile) || fs::exists(run / kWeightsFile)) return;  // RunFolder refuses it
  wait_for_lock(run, how);
  clear_run(run);
}

}  // namespace

bool take_over(std::optional<RunFolder>& folder, const TrainOptions& options, const Judge& judge,
               const TakingOver& how) {
  const fs::path& run = options.keep.run_dir;
  const bool has_run = !run.empty() && fs::exists(run / kConfigFile), is_known = how.met || how.goes_on;
  if (has_run && is_known) wait_for_lock(run, how);
  if (has_run && !is_known) clear_what_was_begun(run, how);
  folder.emplace(run, (has_run && how.met) || how.goes_on, how.files);
  folder->create(options, judge, how.warn);
  return has_run && how.met;
}

}  // namespace lockstep
