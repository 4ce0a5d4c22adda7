// A line of lockstep's that a test takes away. plant.cmake puts the question in front of the line, in a copy of its
// source for this test alone.
#pragma once

#include <atomic>

namespace lockstep::planted {

enum Mistake { none, no_ready_marks, no_done_marks, hook_first, hook_last };

inline std::atomic<Mistake> mistake = none;

inline bool is(Mistake asked) {
  return mistake == asked;
}

}  // namespace lockstep::planted
