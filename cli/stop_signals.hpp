// What the program says when a signal asks it to stop (stop_on_signals.hpp), and how it ends at a second one.
#pragma once

#include <lockstep/base/stop_on_signals.hpp>

namespace lockstep::cli {

// Says so on stderr, unless another process of the job does. At the second signal the program ends, with the exit code
// of one that the signal has ended.
StopOnSignals::Told says_that_it_stops(bool quiet = false);

}  // namespace lockstep::cli
