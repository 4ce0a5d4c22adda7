// What came of a simulated job, and what must hold of it.
#pragma once

#include "plan.hpp"
#include "simulation.hpp"
#include "training.hpp"

#include <deque>
#include <string>
#include <utility>
#include <vector>

namespace lockstep::simulation {

struct Outcome {
  std::string text;                   // the error with which run() ended; "": with none
  bool over = false;                  // run() ended
  Time end = 0;                       // when
  int node = 0;                       // the machine on which it was started
  int place = 0;                      // see ElasticLaunch
  Time start = kNever;                // when; kNever: it was not
  const Process* launcher = nullptr;  // that started it
  int threads_left = 0;               // beside the first, when the process ended
  int connections_left = 0;           // to stores
  int groups_left = 0;                // whose connections stand
  std::vector<Steps> ranks;           // of this process
};

// The launcher of a machine in an elastic job.
struct Launched {
  int node = 0;
  int processes = 1;      // with which it was started
  bool is_extra = false;  // it says that it is a machine which has a launcher
  Time start = 0;
  const Process* process = nullptr;
  std::vector<std::string> said = {};
  bool over = false;
  int code = 0;
  Time end = 0;
};

// A generation of an elastic job, as it was in the store.
struct Past {
  std::vector<int> members;
  bool has_begun;
  int keys = 0;  // that it has left in the store
};

using Texts = std::vector<std::string>;

struct Course {
  Plan plan;
  std::vector<Time> times = {};                       // by strike: when it came; kNever: it did not
  std::string host = {};                              // in the words of the library: who keeps the store
  std::string left = {};                              // threads that could not go on
  std::deque<Outcome> outcomes = {};                  // by process; the successors come last
  std::deque<Launched> launchers = {};                // of an elastic job, the first one first
  std::vector<std::pair<int, Time>> lost_nodes = {};  // as the first one has said, and when
  std::vector<Past> generations = {};
  int saved = 0;  // steps in the last checkpoint that was written, as far as its writer knows
  int found = 0;  // in the one from which a run would go on; 0: there is none
  StateDigest found_state = {};
  Texts files_left = {};        // in the run's folder
  std::string unreadable = {};  // why none could be read
};

// Sentences about what is wrong; none if all is as it must be.
std::vector<std::string> wrongs_of(const Course& course, const Reference* reference);

// How long after the last fault the last process that had none ended.
Time longest_end(const Course& course);

}  // namespace lockstep::simulation
