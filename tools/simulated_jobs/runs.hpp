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
#include <tuple>
#include <vector>

namespace lockstep::simulation {

struct Result {
  std::string wrong;  // lines, one for each wrong; "": all was as it must be
  uint64_t trace = 0;
  int64_t points = 0;
  Time time = 0, longest_end = 0;  // see Report
  bool ended_early = false;
  double seconds = 0;  // seconds that the processor worked for it
};

class Runs {
 public:
  Runs();  // runs the undisturbed jobs. Throws std::runtime_error if one goes wrong.

  Result run(const Plan& plan, bool with_log = false) const;
  std::vector<Result> run_all(const std::vector<Plan>& plans) const;  // takes at most kBatch plans

  static constexpr uint64_t kBatch = 32;

 private:
  using World = std::tuple<Program, int, int>;  // processes, ranks of each
  static World world_of(const Plan& plan);
  const Reference* reference_of(const Plan& plan) const;
  bool run_in_child(const std::vector<Plan>& plans, bool with_log) const;  // says whether the child crashed

  ScratchFolder folder_;
  std::map<World, Reference> references_;
};

}  // namespace lockstep::simulation
