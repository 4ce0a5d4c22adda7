// ElasticLaunch: what a launcher that keeps the store does for an elastic job (generations.hpp). It tells the others
// who is gone, says when successors are to be started, and whom the others have gone on without. It starts and ends no
// process itself. Used by one thread. Its calls throw c10::DistError if the store is gone.
#pragma once

#include "generations.hpp"
#include "meeting.hpp"

#include <chrono>
#include <optional>
#include <string>
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
  };

  // To be made before the processes start. They are the members 0 … processes - 1; successors get the next numbers. At
  // most `restarts` successors are asked for.
  ElasticLaunch(const StorePtr& store, std::string job, int processes, int restarts, const Limits& limits);

  // Gives whether the others go on. One that was killed is a loss, and any other failure ends the job, but for a
  // successor that has not joined.
  bool note_end(int member, const ProcessEnd& end, bool killed);

  // The places for which successors are to be started now, by the number of the process that had each first. They start
  // once the others go on: a program that starts takes the others' time.
  std::vector<int> successors();

  struct Look {
    std::vector<int> dead;    // members whose heart has stopped, or that the others have gone on without
    std::vector<int> late;    // processes that have not begun in time, and count as dead too
    std::vector<int> joined;  // since the last look
  };
  Look look();  // to be called some times a second

  bool takes_part() { return generations_.takes_part(); }
  bool has_lost() const { return has_lost_; }
  int members() const { return static_cast<int>(members_.size()); }  // so far

 private:
  using Clock = std::chrono::steady_clock;
  struct Member {
    int place;   // among the processes that run at the same time
    bool is_in;  // the newest generation, when last looked at
    bool has_begun = false;
    bool has_ended = false;
    int64_t beats = 0;                      // when last looked at
    Clock::time_point seen = Clock::now();  // its silence counts from here
  };

  const StorePtr store_;
  const std::string job_;
  Generations generations_;
  int restarts_left_;
  const Limits limits_;
  int called_off_ = 0;           // generations
  std::vector<Member> members_;  // by number
  std::vector<int> vacant_ = {};
  std::vector<int> coming_ = {};  // members that have not the state yet
  bool has_lost_ = false;
  Clock::time_point looked_ = Clock::now();
  std::optional<Clock::duration> longest_start_;  // until the first beat; none: nobody has begun
  Clock::time_point lost_ = {};                   // the last that was lost
};

}  // namespace lockstep::comm
