// ElasticNodes: the agents of an elastic job's other machines, as node 0's launcher sees them (agent_mail.hpp): who is
// there, who has come (again), and who is silent. Used by one thread.
#pragma once

#include "agent_mail.hpp"
#include "comm/silence_limit.hpp"

#include <chrono>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace lockstep::comm {

class ElasticNodes {
 public:
  // An agent counts as gone after a time in `silence` without a sign of life.
  ElasticNodes(const StorePtr& store, const std::string& job, const Arrival& arrival, const SilenceRange& silence);

  struct News {
    std::vector<std::pair<int, Report>> ended;  // by whose agent, and which process
    std::vector<int> lost;                      // nodes that are silent
    std::vector<std::pair<int, int>> left;      // nodes whose agent has ended, and its exit code
    std::vector<int> came;                      // nodes, also for another time
    std::vector<std::string> refused;           // why an agent was not let in
  };
  News look();  // to be called often. A node that was lost may have come again in the same look

  void order(int node, const Order& order);  // if it is there
  void order_all(const Order& order);
  bool is_there(int node) const { return nodes_[node].is_there; }
  bool may_be_silent(int node) const;                       // it soon counts as lost, or lives after all
  std::chrono::milliseconds silence_limit(int node) const;  // until then; 0: this one, or it is not there
  std::vector<int> absent(int count) const;                 // of the first `count`
  bool are_all_gone() const;

 private:
  using Clock = std::chrono::steady_clock;
  struct Node {
    std::optional<Visit> visit = {};  // the last one that was let in
    bool is_there = false;
    int visits = 0;              // that are known
    std::vector<int> open = {};  // those of them that were neither let in nor refused yet
    int64_t beats = 0;
    Clock::time_point seen = {};  // its silence counts from here
    SilenceLimit silence = SilenceLimit(kSilence);
    std::optional<int64_t> beats_of_first = {};  // when another agent of the same node came
  };

  void read(int node, News& news);
  void see(int node, Clock::time_point time, bool stood_still, News& news);
  void receive(int node, Clock::time_point time, News& news);
  std::chrono::milliseconds limit_of(const Node& node) const;
  void answer(int node, Visit visit, const Arrival& arrival, Clock::time_point time, News& news);

  const StorePtr store_;  // with the prefix of the agents' keys
  const Arrival arrival_;
  const SilenceRange silence_;
  SilenceLimit looks_;       // this launcher's own
  std::vector<Node> nodes_;  // the first is this one
  Clock::time_point looked_ = Clock::now();
  Clock::time_point looked_for_absent_ = {};
};

}  // namespace lockstep::comm
