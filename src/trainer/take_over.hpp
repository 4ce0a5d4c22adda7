// take_over: in an elastic job any process may have to keep the run's folder, whose keeper is gone.
#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <string>

#include "io/file_system.hpp"
#include "run_folder.hpp"

namespace lockstep {

struct TakingOver {
  bool met = false;      // this process has trained with others, so a run of this job is in the folder
  bool goes_on = false;  // the job itself has begun with the run that is in the folder
  std::chrono::milliseconds patience{10'000};  // take_over() waits so long for a keeper that still has the lock
  std::function<void(const std::string&)> warn = {};
  io::FileSystem& files = io::real_files();
};

// Makes this process the keeper of options.keep.run_dir. The keeper before is gone, or stands still until the launcher
// kills it. That process may have been writing, so take_over() waits until the system has given back its lock. If that
// process had begun files and was killed before it met the others, take_over() removes the files. The result says
// whether the folder holds a run that this process has trained with. Throws Error if the lock stays taken, or if a run
// of another job is there.
bool take_over(std::optional<RunFolder>& folder, const TrainOptions& options, const Judge& judge,
               const TakingOver& how);

}  // namespace lockstep
