// Simulated jobs one after the other, each in a child process: what is left of one does not reach the next.
#pragma once

#include "plan.hpp"
#include "simulation.hpp"
#include "support/scratch_folder.hpp"

#include <cstdint>
#include <map>
#include <string>
#include <utility>

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

 private:
  std::string run_in_child(const Plan& plan, const Reference* reference, bool with_log) const;

  ScratchFolder folder_;
  std::map<std::pair<int, int>, Reference> references_;  // by processes, and ranks of each
};

}  // namespace lockstep::simulation
