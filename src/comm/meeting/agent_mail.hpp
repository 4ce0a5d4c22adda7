// What the launchers of an elastic job on several machines tell each other through its store. Node 0's launcher keeps
// the store and decides (elastic_launch.hpp). Each other machine's launcher is an agent (elastic_agent.hpp): it starts
// and kills its processes as it is ordered, and reports how they end.
//
//  1. Whenever a node's agent comes, that is a visit, with a number of its own. An agent that others have gone on
//     without comes again, and reads nothing that was meant for its last visit.
//  2. Each list of messages has one writer and one reader. The writer sets one key after the other, so whoever is
//     killed leaves no gap.
//
// Keys under agents/: first (node 0's own Arrival), visits/<node> (a count), and for each visit <node>/<v>/: arrival,
// beats (a count), orders/<k> and reports/<k> (JSON).
#pragma once

#include "job_store.hpp"
#include "meeting.hpp"

#include <optional>
#include <string>
#include <utility>

namespace lockstep::comm {

inline const std::string kAgents = "agents/";  // the prefix of the keys

std::string visits_key(int node);

// What all nodes must have been started with.
struct Arrival {
  int processes = 1;   // on each node
  int most_nodes = 1;  // at the same time
  bool operator==(const Arrival&) const = default;
};
inline const std::string kFirst = "first";  // the key of node 0's
std::string refusal(int node, const Arrival& theirs, const Arrival& first);

struct Order {
  enum class Kind {
    welcome,  // the node belongs to the job
    start,    // a process: `member`, at `place`
    kill,     // the process `member`
    out,      // the others have gone on without this node
    over,     // the job ends with the exit code `code`; or this agent is not let in, as `why` says
  };
  Kind kind = Kind::welcome;
  int member = 0;
  int place = 0;
  int code = 0;
  std::string why = {};
};

struct Report {
  bool leaves = false;  // the agent itself: its last word. Else a process has ended:
  int member = 0;
  ProcessEnd end = {};
  bool killed = false;  // by a signal, while nothing was to end
  int code = 0;         // the exit code, or 128 + a signal's number
};

std::string to_text(const Order& order);
std::string to_text(const Report& report);
std::string to_text(const Arrival& arrival);
// These throw if the text makes no sense.
void from_text(const std::string& text, Order& order);
void from_text(const std::string& text, Report& report);
void from_text(const std::string& text, Arrival& arrival);

class Visit {
 public:
  Visit(StorePtr store, int node, int number);  // a store with the prefix of the keys

  void arrive(const Arrival& arrival);
  std::optional<Arrival> arrival();
  void beat();
  int64_t beats();
  void post(const Order& order);
  void post(const Report& report);
  std::optional<Order> next_order();  // nothing: there is none yet
  std::optional<Report> next_report();
  int number() const { return number_; }

 private:
  std::string key(const std::string& name) const { return prefix_ + name; }
  template <class Message>
  std::optional<Message> next(const std::string& list, int& count);

  StorePtr store_;
  int number_;
  std::string prefix_;
  int orders_ = 0, reports_ = 0;  // that this end has written, or has read
};

}  // namespace lockstep::comm
