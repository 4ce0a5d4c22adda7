// One simulated job: real ranks, run() and DataParallel over the simulated network, with the fault of a Plan.
#pragma once

#include "plan.hpp"
#include "scheduler.hpp"

#include <array>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace lockstep::simulation {

// The results of an undisturbed run, to compare with.
struct Reference {
  std::array<uint64_t, kSteps> weights{};     // after each step, a digest
  std::array<uint64_t, kSteps> optimizers{};  // digests of the checkpoints' optimizers, in an elastic job too
  int64_t points = 0;                         // scheduling points of one process
  Time time = 0;                              // time until it ended
};

struct Report {
  std::vector<std::string> wrongs;  // empty: all was as it must be
  Reference found;
  uint64_t trace = 0;        // a digest of all that happened
  int64_t points = 0;        // scheduling points of all processes
  Time time = 0;             // virtual
  Time longest_end = 0;      // time from the fault until the last process without one ended
  bool ended_early = false;  // some process ended with an error
};

// The remains of killed processes stay in the program. Checkpoints go to the folder.
Report simulate(const Plan& plan, const Reference* reference, const std::filesystem::path& folder, bool with_log);

}  // namespace lockstep::simulation
