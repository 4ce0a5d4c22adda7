// ElasticLaunch: decides for a launcher on an elastic job (generations.hpp), whose store it keeps. It tells the other
// processes who is gone. It says when to start successors, and which processes were left behind. It starts and ends no
// process (elastic_launcher.hpp does). Use it from one thread. Its calls throw c10::DistError if the store is gone.
#pragma once

#include "comm/meeting/meeting.hpp"
#include "comm/silence_limit.hpp"
#include "generations.hpp"

#include <chrono>
#include <optional>
#include <string>
#include <vector>

namespace lockstep::comm {

class ElasticLaunch {
 public:
  struct Limits {
    // The time after its start when a process without a heart counts as dead, once another process has a heart. It is
    // at least twice the time of the slowest start.
    std::chrono::milliseconds until_first_beat{60'000};
    // The time after a loss when a successor starts even if the others do not go on yet.
    std::chrono::milliseconds until_start{1'000};
  };

  // Make this before the processes start. They are the members 0 … processes - 1; successors get the next numbers. At
  // most `restarts` successors are asked for.
  ElasticLaunch(const StorePtr& store, std::string job, int processes, int restarts, const Limits& limits);

  struct Start {
    int member;
    int place;  // the number of the first member that had this place among the running processes
  };

  // Gives the first processes, which start now.
  std::vector<Start> begin();

  // Tells whether the job goes on without this member, or no longer needs it, since the others have come to the end. A
  // killed process is a loss. Any other failure ends the job, except that of a successor that has not joined.
  bool note_end(int member, const ProcessEnd& end, bool killed);

  // Gives the processes to start now: none until the others go on or until_start is over, since a starting program
  // takes CPU time from them.
  std::vector<Start> successors();

  struct Look {
    std::vector<int> dead;    // members whose heart has stopped, or whom the others have left behind
    std::vector<int> late;    // processes that did not begin in time, and count as dead too
    std::vector<int> joined;  // members that have joined since the last look
    // Members that get no successor, because the kernel had killed another process for want of memory before.
    std::vector<int> given_up;
  };
  Look look();  // call this some times a second

  int place_of(int member) const { return members_[member].place; }
  bool takes_part() { return generations_.takes_part(); }
  std::string folder() { return generations_.folder(); }  // the folder of the program's checkpoints; "": it keeps none
  bool has_lost_all() const { return has_lost_all_; }     // nobody who had the training's state is left
  bool has_lost() const { return has_lost_; }
  bool lacks_successors() const { return lacks_successors_; }  // a place stays empty, since no restart is left

 private:
  using Clock = std::chrono::steady_clock;
  struct Member {
    int place;
    bool is_in;  // it was in the newest generation at the last look
    bool has_begun = false;
    bool has_ended = false;
    int64_t beats = 0;                      // its heart's beats at the last look
    Clock::time_point seen = Clock::now();  // its silence counts from here
  };

  void call_off_until(const Generation& now, const Failure& failure);
  void vacate(int member, bool lacked_memory);
  bool is_dispensable(int member, const Generation& last);
  Start started(int member);

  const StorePtr store_;
  const std::string job_;
  Generations generations_;
  int restarts_left_;
  const Limits limits_;
  int called_off_ = 0;           // the number of generations called off
  std::vector<Member> members_;  // members by number
  std::vector<int> vacant_ = {};
  std::vector<int> given_up_ = {};  // members given up since the last look; see Look::given_up
  std::vector<int> coming_ = {};    // members that do not have the state yet
  bool lacked_memory_ = false;
  bool has_lost_ = false;
  bool has_lost_all_ = false;
  bool has_failed_ = false;           // a process has failed, which ends the job
  bool has_come_to_its_end_ = false;  // a member is done with the job, so nobody could join it
  bool lacks_successors_ = false;
  Clock::time_point looked_ = Clock::now();
  SilenceLimit looks_{kSilence};                  // the limit from this launcher's own looks
  std::optional<Clock::duration> longest_start_;  // the longest time from start to first beat; none: nobody has begun
  Clock::time_point lost_ = {};                   // the time when the last process was lost
};

}  // namespace lockstep::comm
