// FirstLauncher: what the launcher of an elastic job decides that keeps its store: the only one, or node 0's. It starts
// and kills its own machine's processes, gives orders to the others' launchers (agent_launcher.hpp), and says what
// happens. Used by one thread.
#pragma once

#include "elastic_launch.hpp"
#include "launched_machine.hpp"

#include <chrono>
#include <functional>
#include <string>

namespace lockstep::comm {

class FirstLauncher {
 public:
  struct Job {
    std::string name;
    int processes;  // of all machines with which it begins
    int restarts;
    ElasticLaunch::Machines machines = {};
    ElasticLaunch::Limits limits = {};  // machines that are to come have as long as processes that are to begin
    // What the user calls the number of restarts, and how he starts a machine's launcher.
    std::string restarts_name = {}, how_to_start_one = {};
  };
  // For a program that takes no part in elastic jobs: tells those who wait for it that a process has ended.
  using Announce = std::function<void(int member, int place, const ProcessEnd& end)>;

  FirstLauncher(const StorePtr& store, Job job, LaunchedMachine& machine, Announce announce);

  void begin();  // starts the processes, unless machines have to come first

  // To be called often. `ending` is the exit code once the processes are to end, and 0 before. Gives whether to go on
  // though no process of this machine runs.
  bool look(int ending);

  bool note_end(int member, const ProcessEnd& end, bool killed);  // gives whether the others go on

  bool has_lost() const { return elastic_.has_lost(); }
  bool takes_part() { return elastic_.takes_part(); }

 private:
  using Clock = std::chrono::steady_clock;

  bool has_agents() const { return job_.machines.most > 1; }
  void start_all();
  void start(const ElasticLaunch::Start& start);
  bool start_successors();
  bool wait_for_agents();
  void end_agents(int code);
  void end_all(int code);
  void hear();
  void lose(const ElasticLaunch::Heard::LostNode& loss);
  void look_at_hearts();
  void kill(int member);
  std::string process_is_gone(int member) const;

  const Job job_;
  LaunchedMachine& machine_;
  const Announce announce_;
  ElasticLaunch elastic_;
  const Clock::time_point made_ = Clock::now();  // when the others' launchers could first come
  Clock::time_point looked_ = {};
  bool begun_ = false;
  bool is_ending_ = false;
  bool said_that_none_are_left_ = false;
  int code_ = 0;          // with which all are to end, since this class says so
  std::string why_ = {};  // the job ends, for the other machines' users
};

}  // namespace lockstep::comm
