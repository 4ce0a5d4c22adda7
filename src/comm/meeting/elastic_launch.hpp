// ElasticLaunch: what a launcher that keeps the store does for an elastic job (generations.hpp). It tells the others
// who is gone, says when successors are to be started, and whom the others have gone on without. It starts and ends no
// process of its own machine itself; to the agents of other machines (elastic_agent.hpp) it gives orders. Used by one
// thread. Its calls throw c10::DistError if the store is gone.
#pragma once

#include "comm/silence_limit.hpp"
#include "elastic_nodes.hpp"
#include "generations.hpp"
#include "meeting.hpp"

#include <chrono>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace lockstep::comm {

class ElasticLaunch {
 public:
  struct Limits {
    // Once a process has a heart, another one without a heart counts as dead this long after its start. It has at least
    // twice the time of the slowest start.
    std::chrono::milliseconds until_first_beat{60'000};
    // From a loss until a successor starts even if the others do not go on yet.
    std::chrono::milliseconds until_start{1'000};
    // After which another machine's agent counts as gone, and its processes with it.
    SilenceRange agent_silence{std::chrono::seconds(1), std::chrono::seconds(3)};
  };

  struct Machines {
    int nodes = 1;
    int most = 1;  // more may come while the job runs
  };

  // To be made before the processes start. They are the members 0 … processes - 1; successors get the next numbers. At
  // most `restarts` successors are asked for. Each machine has as many processes.
  ElasticLaunch(const StorePtr& store, std::string job, int processes, int restarts, const Limits& limits,
                const Machines& machines);
  ElasticLaunch(const StorePtr& store, std::string job, int processes, int restarts, const Limits& limits)
      : ElasticLaunch(store, std::move(job), processes, restarts, limits, {}) {}

  struct Start {
    int member;
    int place;  // among the processes that run at the same time; the number of the first that had it
    int node;   // 0: the caller starts it. Else its node's agent does, and has been told
  };

  // The first processes, which start now.
  std::vector<Start> begin();

  // What other machines' agents have said, and who of them is silent. To be called often.
  struct Heard {
    std::vector<Report> ended;  // to be given to note_end()
    struct LostNode {
      int node;
      std::vector<int> members;      // that were lost with it
      bool go_on;                    // the others
      std::optional<int> code = {};  // its agent has ended, with this exit code. None: it is silent
    };
    std::vector<LostNode> lost;  // also an agent that ended with nothing left to lose
    std::vector<int> came;
    std::vector<std::string> refused;
  };
  Heard hear();
  std::vector<int> absent_nodes() const { return nodes_.absent(first_nodes_); }

  // Gives whether the others go on, or have come to their end without it. One that was killed is a loss, and any other
  // failure ends the job, but for a successor that has not joined.
  bool note_end(int member, const ProcessEnd& end, bool killed);

  // Those that are to be started now, which is once the others go on: a program that starts takes the others' time. The
  // places of a machine whose agent is gone wait until it comes again.
  std::vector<Start> successors();

  struct Look {
    std::vector<int> dead;    // members whose heart has stopped, or that the others have gone on without
    std::vector<int> late;    // processes that have not begun in time, and count as dead too
    std::vector<int> joined;  // since the last look
    // Members that get no successor, because the kernel has killed another one of their machine for want of memory too.
    std::vector<int> given_up;
  };
  Look look();  // to be called some times a second

  void kill(int member);  // of another machine
  // The job ends with this exit code, for a reason that this machine's user has been told: all agents are told too.
  void end(int code, const std::string& why);

  int node_of(int member) const { return members_[member].place / places_; }
  int place_of(int member) const { return members_[member].place; }
  bool takes_part() { return generations_.takes_part(); }
  bool has_lost() const { return has_lost_; }
  bool lacks_successors() const { return lacks_successors_; }     // a place stays empty, since no restart is left
  bool some_run() const;                                          // of all machines
  bool agents_are_gone() const { return nodes_.are_all_gone(); }  // or there is none

 private:
  using Clock = std::chrono::steady_clock;
  struct Member {
    int place;
    bool is_in;  // the newest generation, when last looked at
    bool has_begun = false;
    bool has_ended = false;
    int64_t beats = 0;                      // when last looked at
    Clock::time_point seen = Clock::now();  // its silence counts from here
  };

  std::vector<std::chrono::milliseconds> silences(const std::vector<std::optional<Generations::Heart>>& hearts) const;
  bool there(int node) const { return node == 0 || nodes_.is_there(node); }
  void call_off_until(const Generation& now, const Failure& failure);
  void vacate(int member, bool lacked_memory = false);
  bool is_dispensable(int member, const Generation& last);
  Heard::LostNode lose_node(int node, const std::string& how, const std::vector<Report>& ended);
  Start started(int member);

  const StorePtr store_;
  const std::string job_;
  const int places_;       // on each machine
  const int first_nodes_;  // which the job begins with
  Generations generations_;
  ElasticNodes nodes_;
  int restarts_left_;
  std::optional<Order> ended_with_;  // that the job is over
  const Limits limits_;
  int called_off_ = 0;           // generations
  std::vector<Member> members_;  // by number
  std::vector<int> vacant_ = {};
  std::set<int> short_of_memory_ = {};  // nodes
  std::vector<int> given_up_ = {};      // since the last look
  std::set<int> later_nodes_ = {};      // that have come
  std::vector<int> coming_ = {};        // members that have not the state yet
  bool begun_ = false;
  bool has_lost_ = false;
  bool has_failed_ = false;           // a process, and its failure ends the job
  bool has_come_to_its_end_ = false;  // a member is done with the job, so nobody could join it
  bool lacks_successors_ = false;
  Clock::time_point looked_ = Clock::now();
  SilenceLimit looks_{kSilence};                  // this launcher's own
  std::optional<Clock::duration> longest_start_;  // until the first beat; none: nobody has begun
  Clock::time_point lost_ = {};                   // the last that was lost
};

}  // namespace lockstep::comm
