// The Board has the keys in the store by which the processes of a run tell each other how they are.
//
//   failure          the job's first failure, or that it ended well; whichever comes first is final
//   where            where one rank was when another process died
//   beat/<process>   its heartbeat
//   state/<rank>     what the rank waits in, or that it has returned
//   calls/<rank>     what the rank had called when it returned; on GPUs, when the run failed too
//   done             how many processes are done
//   closed           how many have taken their communicators down
//
// Reading throws ForeignValue for a value that no process of the run can have written. Every call but the agreed_ ones
// throws if the store does not answer. All calls are thread-safe.
#pragma once

#include "calls.hpp"
#include "comm/failure.hpp"
#include "comm/meeting/rendezvous.hpp"
#include "comm/meeting/roster.hpp"
#include "rank_state.hpp"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace lockstep::comm {

struct Heartbeat {
  int64_t count = 0;                    // the process's count of beats; 0: it has not begun
  int64_t activity = 0;                 // see Activity (watchdog.hpp)
  std::chrono::milliseconds silence{};  // the silence after which the process counts as dead, by its own gaps
};

// More than twelve functions: each key has some.
class Board {
 public:
  // `store` is the board's own connection. `host` says in words who keeps the store.
  Board(StorePtr store, Roster roster, int process, std::string host);

  void begin(const Heartbeat& first);  // leaves this process's first keys

  void put_heartbeat(const Heartbeat& beat);
  std::vector<Heartbeat> heartbeats();  // gives heartbeats by process

  void put_state(int rank, const std::string& text);  // takes RankState::to_text()
  std::vector<RankState> states();                    // gives states by rank

  void put_calls(int rank, const Calls& calls);
  std::vector<Calls> calls();                       // gives calls by rank
  std::vector<std::optional<Calls>> known_calls();  // gives none for a rank that has put none

  void put_come(const std::string& place);  // says that this process has come to "done" or "closed"
  bool all_come(const std::string& place);  // tells whether every process has come there

  Failure failure();  // gives an empty one while all is well, or if the run ended well

  // Call this when all processes are done and all is well. Gives the failure that came before all the same. Later
  // failures do not count, since some processes may have returned by then.
  Failure agreed_end();

  // These give all processes the value of the process that called first. If the store does not answer, this process
  // gets its own value. agreed_failure gives an empty failure if the run had ended well before.
  Failure agreed_failure(const Failure& failure);
  std::string agreed_where(const std::string& text);

  // Notes that the store does not answer any more. Gives the failure for that.
  Failure lose_store();
  bool store_is_lost() const { return store_is_lost_; }
  const std::string& host() const { return host_; }

 private:
  template <class Parse>
  auto read_all(const std::string& prefix, size_t count, const Parse& parse);
  std::string first_of(const std::string& key, const std::string& text);
  std::string agreed(const std::string& key, const std::string& text);

  const StorePtr store_;
  const Roster roster_;
  const int process_;
  const std::string host_;
  std::atomic<bool> store_is_lost_ = false;
};

}  // namespace lockstep::comm
