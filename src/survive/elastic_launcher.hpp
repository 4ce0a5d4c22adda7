// ElasticLauncher: carries out ElasticLaunch's decisions on an elastic job, and tells the user. It keeps the job's
// store. `lockstep launch` gives it real processes; the simulation of jobs has its own. Use it from one thread.
#pragma once

#include "elastic_launch.hpp"

#include <functional>
#include <string>

namespace lockstep::comm {

class LaunchedProcesses {
 public:
  virtual ~LaunchedProcesses() = default;

  virtual void start(int member, int place) = 0;  // throws Error if it cannot be started
  virtual void kill(int member) = 0;
  virtual void say(const std::string& text) = 0;  // tells the launcher's user
};

class ElasticLauncher {
 public:
  struct Job {
    std::string name;
    int processes;
    int restarts;
    ElasticLaunch::Limits limits = {};
    std::string restarts_name = {};  // the user's name for the number of restarts
  };
  // Announces a process's end to the processes that wait for it, if the program takes no part in elastic jobs.
  using Announce = std::function<void(int member, int place, const ProcessEnd& end)>;

  ElasticLauncher(const StorePtr& store, Job job, LaunchedProcesses& processes, Announce announce);

  void begin();  // starts the processes

  // Call this some times a second until the processes are to end. Tells whether it started a process.
  bool look();

  bool note_end(int member, const ProcessEnd& end, bool killed);  // tells whether the job goes on without it

  // Call this when all processes have ended, and the job has failed. It gives the reason where no process's end shows
  // one. `newest_in` gives the newest checkpoint in a folder, or "".
  void say_why(const std::function<std::string(const std::string& folder)>& newest_in);

 private:
  void look_at_hearts();
  bool start_successors();

  const Job job_;
  LaunchedProcesses& processes_;
  const Announce announce_;
  ElasticLaunch elastic_;
  bool said_that_none_are_left_ = false;
};

}  // namespace lockstep::comm
