// AgentLauncher: the launcher of one machine in an elastic job of several, unless it keeps the store. It does as node
// 0's launcher says (first_launcher.hpp), and comes again if that one has gone on without this machine. Used by one
// thread. If the store is gone, it says so and ends its processes.
#pragma once

#include "elastic_agent.hpp"
#include "launched_machine.hpp"

#include <chrono>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace lockstep::comm {

class AgentLauncher {
 public:
  struct Job {
    std::string name;
    int node;
    Arrival arrival;
    std::string store_place;             // for texts
    std::chrono::milliseconds patience;  // with node 0, until it takes this machine in
  };

  // Comes to the job at once.
  AgentLauncher(const StorePtr& store, Job job, LaunchedMachine& machine);

  // To be called some times in ElasticAgent::kBeat, also while processes end: it says that this machine lives. `ending`
  // is the exit code once the processes are to end, and 0 before. Gives whether to go on though no process runs.
  bool look(int ending);

  // See ElasticAgent.
  bool note_end(int member, const ProcessEnd& end, bool killed, int code);
  void leave(int code);

 private:
  using Clock = std::chrono::steady_clock;

  void obey(const std::vector<Order>& orders, bool ends);
  void start(const Order& order);
  void come_again();
  void end(int code, const std::string& why);
  template <class Work>
  void with_store(const Work& work);

  const Job job_;
  LaunchedMachine& machine_;
  std::optional<ElasticAgent> agent_;  // nothing: the store was gone from the start
  std::set<int> running_ = {};
  size_t started_ = 0;
  Clock::time_point came_ = Clock::now();
  bool welcome_ = false;
  bool is_over_ = false;
  bool is_cut_off_ = false;
};

}  // namespace lockstep::comm
