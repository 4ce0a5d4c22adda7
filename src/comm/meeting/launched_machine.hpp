// LaunchedMachine: one machine's processes, as the code sees them that decides for its launcher (first_launcher.hpp,
// agent_launcher.hpp). `lockstep launch` starts real ones; the simulation of jobs has its own.
#pragma once

#include <string>

namespace lockstep::comm {

class LaunchedMachine {
 public:
  virtual ~LaunchedMachine() = default;

  virtual void start(int member, int place) = 0;  // throws Error: it cannot be started
  virtual void kill(int member) = 0;
  virtual void end_all(int code) = 0;  // they have some time to end by themselves; then the launcher has this exit code
  virtual void say(const std::string& text) = 0;  // to the launcher's user
};

}  // namespace lockstep::comm
