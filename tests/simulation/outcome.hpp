// What came of a simulated job, and what must hold of it.
#pragma once

#include "plan.hpp"
#include "simulation.hpp"
#include "training.hpp"

#include <deque>
#include <string>
#include <vector>

namespace lockstep::simulation {

struct Outcome {
  std::string text;          // the error with which run() ended; "": with none
  bool over = false;         // run() ended
  Time end = 0;              // when
  int threads_left = 0;      // beside the first, when the process ended
  std::vector<Steps> ranks;  // of this process
};

struct Course {
  Plan plan;
  std::vector<Time> times = {};       // by strike: when it came; kNever: it did not
  std::string host = {};              // in the words of the library: who keeps the store
  std::string left = {};              // threads that could not go on
  std::deque<Outcome> outcomes = {};  // by process; the successors come last
  int saved = 0;                      // steps in the last checkpoint that was written, as far as its writer knows
  int found = 0;                      // in the one from which a run would go on; 0: there is none
  uint64_t found_weights = 0;         // a digest
  std::string unreadable = {};        // why none could be read
};

// Sentences about what is wrong; none if all is as it must be.
std::vector<std::string> wrongs_of(const Course& course, const Reference* reference);

// How long after the last fault the last process that had none ended.
Time longest_end(const Course& course);

}  // namespace lockstep::simulation
