// This file has the one job of a real process.
#include "job.hpp"

namespace lockstep::comm {

Job& Job::of_this_process() {
  static Job job;
  return job;
}

}  // namespace lockstep::comm
