// Simulated jobs one after the other, in child processes: what is left of killed ones, such as their threads, goes with
// the child. A child runs a batch of seeds, since it costs as much as a run to begin one. Whatever seems to go wrong in
// a batch is run again alone.
#pragma once

#include "plan.hpp"
#include "simulation.hpp"
#include "support/scratch_folder.hpp"

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace lockstep::simulation {

struct Result {
  std::string wrong;  // lines, one for each wrong; "": all was as it must be
  uint64_t trace = 0;
  int64_t points = 0;
  Time time = 0, longest_end = 0;  // see Report
  bool ended_early = false;
};

class Runs {
 public:
  Runs();  // runs the undisturbed jobs. Throws std::runtime_error if one goes wrong.

  Result run(uint64_t seed, bool with_log = false) const;
  std::vector<Result> run_all(uint64_t first, uint64_t last) const;  // at most kBatch

  static constexpr uint64_t kBatch = 32;

 private:
  const Reference* reference_of(const Plan& plan) const;
  void run_in_child(const std::vector<Plan>& plans, bool with_log) const;

  ScratchFolder folder_;
  std::map<std::pair<int, int>, Reference> references_;  // by processes, and ranks of each
};

}  // namespace lockstep::simulation
