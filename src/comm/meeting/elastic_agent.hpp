// ElasticAgent: what the launcher of one machine does in an elastic job of several, unless it is node 0's, which keeps
// the store (agent_mail.hpp). It starts and ends no process itself. Used by one thread. Its calls throw c10::DistError
// if the store is gone, and with it the job.
#pragma once

#include "agent_mail.hpp"
#include "generations.hpp"

#include <chrono>
#include <optional>
#include <string>
#include <vector>

namespace lockstep::comm {

class ElasticAgent {
 public:
  static constexpr std::chrono::milliseconds kBeat{50};

  // Comes to the job at once.
  ElasticAgent(const StorePtr& store, const std::string& job, int node, const Arrival& arrival);

  // Comes again, as after an order `out`.
  void come();

  // Those that have come since the last call. Also says that this machine lives: to be called some times in kBeat.
  // An order `start` that is given here may have an order `kill` after it.
  std::vector<Order> orders();

  // Why node 0 does not answer this one: it looks for no node with such a number. "": it does, or has not begun.
  std::string refusal();

  // Gives whether the others may go on without it: one that was killed is a loss, and any other failure ends the job,
  // but for a successor that has not joined. If node 0 decides otherwise, the order `over` comes.
  bool note_end(int member, const ProcessEnd& end, bool killed, int code);

  void leave(int code);  // the last call, with the launcher's exit code

 private:
  using Clock = std::chrono::steady_clock;

  const StorePtr store_;  // with the prefix of the agents' keys
  Generations generations_;
  const int node_;
  const Arrival arrival_;
  std::optional<Visit> visit_;
  Clock::time_point beaten_ = {};
};

}  // namespace lockstep::comm
