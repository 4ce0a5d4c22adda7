// Children: the processes of a simulated elastic job, in the hands of its launcher's thread. It does as ChildProcesses
// of the program does with real ones: it starts processes, sees each one's end, and kills those that are late.
#pragma once

#include "scheduler.hpp"
#include "survive/elastic_launcher.hpp"

#include <functional>
#include <string>
#include <vector>

namespace lockstep::simulation {

constexpr Time kUntilKilled = 5 * kSecond;  // time that `lockstep launch` gives processes after the first failure

class Children : public comm::LaunchedProcesses {
 public:
  struct Hooks {
    std::function<Process&(int member, int place)> start;
    std::function<std::string(int member)> failure_of;  // the failure of a member that has ended by itself; "": none
    std::function<void(int member)> kill;
    std::function<void(const std::string& text)> say;
    const void* ends;  // is woken when a process has ended
  };

  Children(Scheduler& scheduler, Hooks hooks) : scheduler_(scheduler), hooks_(std::move(hooks)) {}

  // Waits until none runs. Gives the launcher's exit code.
  int wait(comm::ElasticLauncher& launcher, const std::function<std::string(const std::string& folder)>& newest_in);

  void start(int member, int place) override;
  void kill(int member) override;
  void say(const std::string& text) override { hooks_.say(text); }

 private:
  struct Child {
    int member;
    Process* process;
    bool runs;
  };

  bool reap(comm::ElasticLauncher& launcher);
  void note_end(const Child& child, comm::ElasticLauncher& launcher);

  Scheduler& scheduler_;
  const Hooks hooks_;
  std::vector<Child> children_ = {};
  Time to_kill_ = kNever;
  int first_failure_ = 0;
};

}  // namespace lockstep::simulation
