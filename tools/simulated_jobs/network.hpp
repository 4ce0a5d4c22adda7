// Network: what lies between the simulated processes. Messages take a time that the seed draws, those of one pair of
// processes in one direction keep their order, and connections end with a process.
#pragma once

#include "scheduler.hpp"

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace lockstep::simulation {

struct Network {
  using Bytes = std::vector<uint8_t>;

  // A store that some process keeps.
  struct Host {
    Process* process = nullptr;
    std::map<std::string, Bytes> values = {};
    std::vector<std::string> generations = {};  // an elastic job's generations, in the order in which they were stored
  };

  // Whoever has connections. It hears of the end of a connected process.
  class Endpoint {
   public:
    Endpoint(Network& network, Process& process);
    virtual ~Endpoint();
    Endpoint(const Endpoint&) = delete;
    Endpoint& operator=(const Endpoint&) = delete;
    virtual void process_is_gone(const Process& process) = 0;  // called as an event

    const int number;
    Process& process;
    Network& network;
  };

  explicit Network(Scheduler& scheduler);

  // The time when something that is sent now will be there.
  Time arrival(const Process& from, const Process& to);

  // Nothing passes between the two until then.
  void cut(const Process& one, const Process& other, Time until);
  Time cut_until(const Process& one, const Process& other) const;

  Endpoint* endpoint(int number) const;  // null: it is gone

  void tell_of_death(const Process& process);
  bool is_reset(const Process& from, const Process& to) const;  // messages on their way there are lost

  Scheduler& scheduler;
  std::map<int, std::shared_ptr<Host>> hosts = {};  // hosts by port
  Time lateness = 0;                                // the most by which one message in 50 is late
  std::vector<std::string> wrongs = {};             // things that must not happen, and did

 private:
  using Pair = std::pair<int, int>;

  std::map<int, Endpoint*> endpoints_;
  int next_ = 0;
  std::map<Pair, Time> cut_;
  std::map<Pair, Time> last_arrival_;
  std::set<Pair> reset_;
  Time latency_;  // the most that a message usually takes
};

Network& network();  // this program's simulation has one network

}  // namespace lockstep::simulation
