// TimedJob: a launched job and how long it took, and single processes of a job without a launcher.
#pragma once

#include "running_job.hpp"

#include <chrono>
#include <string>
#include <utility>
#include <vector>

namespace lockstep {

struct TimedJob {
  Finished job;
  std::chrono::steady_clock::duration took;
};

inline TimedJob timed(int processes, const Words& words, const Words& variables = {}) {
  const auto start = std::chrono::steady_clock::now();
  auto job = run_launched(processes, words, variables);
  return {std::move(job), std::chrono::steady_clock::now() - start};
}

// Jobs with these words run side by side, since they mostly wait.
inline std::vector<TimedJob> timed_side_by_side(int processes, const std::vector<Words>& jobs) {
  std::vector<TimedJob> results(jobs.size());
  side_by_side(static_cast<int>(jobs.size()), [&](int i) { results[i] = timed(processes, jobs[i]); });
  return results;
}

// One of two processes without a launcher.
inline Program start_rank(int rank, const std::string& port, const Words& words) {
  auto surroundings = surroundings_with(as_rank(rank, 2, port, "60"));
  surroundings.program = ranks_program();
  return {words, surroundings};
}

}  // namespace lockstep
