// Asks what a process was told of signals.
#pragma once

#include <csignal>

namespace lockstep {

// Whether this process ignores the signal. nohup starts such processes, and so does a script in the background. An
// ignored signal that is blocked and awaited would come all the same.
inline bool is_ignored(int signal) {
  struct sigaction action {};
  return sigaction(signal, nullptr, &action) == 0 && action.sa_handler == SIG_IGN;
}

}  // namespace lockstep
