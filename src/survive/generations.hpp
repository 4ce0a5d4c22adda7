// Generations: keeps the sets of processes that an elastic job has, one after the other. In such a job (`lockstep
// launch --elastic`) the others go on when a process is gone, and a successor joins them.
//
//  1. The newest generation is one value in the store. It changes by comparison alone. So all agree on it, whoever
//     changes the value: the launcher, a member, or a process that joins.
//  2. A member is a process by its number in the job. A successor has a number of its own, so no number comes twice.
//  3. Members keep their order, and those who join come last. So the first has been a member for longest.
//  4. A process joins a generation that has begun: all of its members have the job's state. Otherwise two processes
//     that join one after the other would wait for each other's generation.
//  5. A job that is over gets no other generation.
//
// Keys in the store: newest (JSON), takes_part, folder, heart/<m>, begun/<n>, and left/<n>/<m> (member m has left
// generation n since somebody is gone). Thread-safe as the store is: each user has a connection of its own.
#pragma once

#include "comm/failure.hpp"
#include "comm/meeting/job_store.hpp"

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace lockstep::comm {

struct Generation {
  int number = 0;
  std::vector<int> members;
  bool over = false;  // the job has ended, or nobody is left

  std::optional<int> index_of(int member) const;
};

inline const std::string kGenerations = "generations";  // the prefix of the keys
std::string keys_of_generation(int number);             // the prefix of its run's keys

// Call this on the launcher alone. It ends the run of this generation, or the wait for members, if neither has ended
// before.
void call_off(const StorePtr& store, const std::string& job, int generation, const Failure& failure);

// More than twelve functions: each reads or changes one value in the store.
class Generations {
 public:
  explicit Generations(StorePtr store) : store_(std::move(store)) {}  // Rendezvous::connect(kGenerations)
  Generations(const StorePtr& store, const std::string& job);         // the launcher's, which keeps the store

  void begin(int processes);  // launcher: call it before starting the processes of the first generation
  Generation newest();        // throws c10::DistError if the store is gone

  // Each of these functions gives the newest generation afterwards. A process that wanted to join is not in a
  // generation that has not begun.
  Generation lose(int member);  // takes a member out
  Generation join(int member);
  Generation end();

  void note_beginning(int generation);  // its members have met, and have the same state
  bool has_begun(int generation);

  // A member that takes part has a heart, from the member's beginning until the end of its work. The launcher watches
  // hearts, so that nobody waits for a member that stands still.
  struct Heart {
    int64_t beats = 0;                    // 0: the member is done
    std::chrono::milliseconds silence{};  // the silence after which a member counts as dead, by its own gaps
    std::chrono::milliseconds most{};     // the longest such silence, by the others' gaps too; see silence_limit.hpp
  };
  void beat(int member, const Heart& heart);
  std::optional<Heart> heart_of(int member);  // nothing: the member has not begun

  // Says that the program takes part, so that a successor of a lost process can join. `folder` has its checkpoints, and
  // is "" if there are none.
  void take_part(const std::string& folder = {});
  bool takes_part();
  std::string folder();

  // Notes that a member has left a generation because somebody is gone. The launcher may not know the lost member, as
  // when a process stands still. Then the members that have left by that time go on together.
  void leave(int generation, int member);
  Generation keep_those_who_left(int generation);

 private:
  Generation change(const std::function<bool(Generation&)>& change);  // does nothing if `change` gives false

  const StorePtr store_;
};

}  // namespace lockstep::comm
