// Machine: a machine of a simulated elastic job, in the hands of its launcher's thread. It does as ChildProcesses of
// the program does with real processes: it starts them, sees how they end, and kills those that do not end in time.
#pragma once

#include "comm/meeting/launched_machine.hpp"
#include "comm/meeting/meeting.hpp"
#include "scheduler.hpp"

#include <functional>
#include <string>
#include <vector>

namespace lockstep::simulation {

class Machine : public comm::LaunchedMachine {
 public:
  struct Hooks {
    std::function<Process&(int member, int place)> start;
    std::function<std::string(int member)> failure_of;  // of one that has ended by itself; "": none
    std::function<void(int member)> kill;
    std::function<void(const std::string& text)> say;
    const void* ends;  // is woken when a process has ended
  };
  struct Launcher {
    std::function<bool(int member, const comm::ProcessEnd& end, bool killed, int code)> note_end;
    std::function<bool(int ending)> look;
  };

  Machine(Scheduler& scheduler, Time between_looks, Hooks hooks)
      : scheduler_(scheduler), between_looks_(between_looks), hooks_(std::move(hooks)) {}

  int wait(const Launcher& launcher);  // until none runs, and the launcher does not go on. Gives its exit code

  void start(int member, int place) override;
  void kill(int member) override;
  void end_all(int code) override;
  void say(const std::string& text) override { hooks_.say(text); }

 private:
  struct Child {
    int member;
    Process* process;
    bool runs;
  };

  bool reap(const Launcher& launcher);
  void note_end(const Child& child, const Launcher& launcher);

  Scheduler& scheduler_;
  const Time between_looks_;
  const Hooks hooks_;
  std::vector<Child> children_ = {};
  Time to_kill_ = kNever;
  int first_failure_ = 0;
};

}  // namespace lockstep::simulation
