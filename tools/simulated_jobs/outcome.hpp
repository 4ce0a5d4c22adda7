// The outcome of a simulated job, and the rules that it must keep.
#pragma once

#include "plan.hpp"
#include "simulation.hpp"
#include "training.hpp"

#include <deque>
#include <optional>
#include <string>
#include <vector>

namespace lockstep::simulation {

struct Outcome {
  std::string text;          // the error with which run() ended; "": with none
  bool over = false;         // run() ended
  Time end = 0;              // time when it ended
  int place = 0;             // see ElasticLaunch
  bool was_started = false;  // it was started in an elastic job
  int threads_left = 0;      // threads beside the first, when the process ended
  int connections_left = 0;  // connections to stores
  int groups_left = 0;       // groups with connections left
  std::vector<Steps> ranks;  // steps of this process's ranks
};

// A generation of an elastic job, as it was in the store.
struct Past {
  std::vector<int> members;
  bool has_begun;
  int keys = 0;  // keys that it has left in the store
};

using Texts = std::vector<std::string>;

struct Course {
  Plan plan;
  std::vector<Time> times = {};           // times when the strikes came; kNever: one did not
  std::string host = {};                  // in the words of the library: who keeps the store
  std::string left = {};                  // threads that could not go on
  std::deque<Outcome> outcomes = {};      // outcomes by process; the successors come last
  Texts said = {};                        // texts by the launcher of an elastic job
  std::optional<int> launcher_code = {};  // its exit code
  std::vector<Past> generations = {};
  int saved = 0;  // steps in the last checkpoint that was written, as far as its writer knows
  int found = 0;  // steps in the checkpoint to go on from; 0: there is none
  StateDigest found_state = {};
  Texts files_left = {};        // in the run's folder
  std::string unreadable = {};  // why no checkpoint could be read
};

// Sentences about what is wrong; none if all is as it must be.
std::vector<std::string> wrongs_of(const Course& course, const Reference* reference);

// How long after the last fault the last process that had none ended.
Time longest_end(const Course& course);

}  // namespace lockstep::simulation
