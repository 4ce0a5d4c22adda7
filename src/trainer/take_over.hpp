// take_over: in an elastic job any process may have to keep the run's folder, whose keeper is gone.
#pragma once

#include <lockstep/trainer/trainer.hpp>

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
  std::chrono::milliseconds patience{10'000};  // with a keeper that still has the lock
  std::function<void(const std::string&)> warn = {};
  io::FileSystem& files = io::real_files();
};

// Makes options.keep.run_dir the folder that this process keeps. Its keeper is gone, or stands still and is about to be
// killed by the launcher, and its lock goes with it. It may have been writing, so nobody else may until then: this
// waits. What a keeper began that was killed before it met the others is removed. Gives whether a run was there that
// this process has trained with. Throws Error if the lock is not to be had, or if a run is there that is not this
// job's.
bool take_over(std::optional<RunFolder>& folder, const TrainOptions& options, const Judge& judge,
               const TakingOver& how);

}  // namespace lockstep
