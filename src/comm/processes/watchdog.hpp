// A Watchdog is a thread that says that its process lives, and looks whether the others live.
//
// Ten times a second it leaves a heartbeat on the board and looks for a failure there. While there is a reason, such as
// an own rank that has waited for long, it looks around: whose heart has stopped, who has returned, whose call differs.
// A failure that it finds becomes the run's. It also counts how long the ranks have waited, and ends the run at a
// timeout. Time in which the process stood still (Ctrl-Z) does not count.
//
// Once the user has asked for a stop, it ends waits that go on while no process of the run does anything. It alone
// writes this process's heartbeat. It talks to the store without holding a lock.
#pragma once

#include "board.hpp"
#include "calls.hpp"
#include "comm/meeting/roster.hpp"
#include "comm/silence_limit.hpp"
#include "waits.hpp"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <stop_token>
#include <string>
#include <thread>
#include <vector>

namespace lockstep::comm {

// Activity tells whether this process does anything, apart from waiting for others. It counts once the user has asked
// for a stop: the run then waits for a rank that computes or writes a checkpoint.
class Activity {
 public:
  // Call this a few times a second, always from the same thread, whose own work does not count. `moves` counts the
  // ranks' moves, and the result grows with `moves`. While a rank is `on_its_own` (it waits for no other), the result
  // also grows if threads have computed meanwhile, or one waits for a disk.
  int64_t count(int64_t moves, bool on_its_own);

 private:
  using Clock = std::chrono::steady_clock;
  using Time = std::chrono::nanoseconds;

  int64_t count_ = 0;
  int64_t moves_ = 0;
  Clock::time_point looked_ = {};
  Time computed_{};
};

class Watchdog {
 public:
  using Clock = Waits::Clock;
  static constexpr std::chrono::milliseconds kBeat{100};
  static constexpr auto kUntilSaid = 2 * kBeat;  // others that are late too have so long to say what they wait in

  struct Options {
    Clock::duration long_wait;  // a wait that lasts longer is looked into
    SilenceRange silence;       // the time without a heartbeat after which a process counts as dead
    std::stop_token stop = {};
  };

  // Keep the board, the waits, the log and the roster longer than the watchdog.
  Watchdog(Board& board, Waits& waits, const CallLog& log, const Roster& roster, int process, Options options);
  ~Watchdog();
  Watchdog& operator=(Watchdog&&) = delete;

  // The thread calls `on_failure` once, and `look`, if there is one, with each beat. `look` gives a failure, or an
  // empty one.
  void start(std::function<void()> on_failure, std::function<Failure()> look = {});
  void stop();  // the thread calls neither function afterwards

 private:
  void run();
  void beat();
  Heartbeat next_heartbeat();
  void look_around();
  void publish(const std::vector<Waits::Wait>& waits, const std::set<int>& returned);
  void watch_hearts();
  Clock::duration silence_of_the_dead(const std::vector<Heartbeat>& beats) const;
  void end_waits_of_a_stop(const std::vector<RankState>& states);
  void report(const Failure& failure);
  void put_calls();

  Board& board_;
  Waits& waits_;
  const CallLog& log_;
  const Roster& roster_;
  const int process_;
  const Options options_;
  std::function<void()> on_failure_;
  std::function<Failure()> look_;
  std::atomic<bool> stop_ = false;

  // Only the thread uses these.
  Activity activity_;
  int64_t own_beats_ = 0;
  SilenceLimit own_limit_;
  std::map<int, std::string> published_;  // published texts by rank
  std::vector<Heartbeat> beats_;          // heartbeats by process, at the last look
  std::vector<Clock::time_point> seen_;   // times by process at which its count had changed
  Clock::time_point last_beat_ = Clock::now();
  Clock::time_point active_{};      // the time when some process's activity had changed
  Clock::time_point stop_asked_{};  // the time when a request to stop was seen; the epoch before that
  Clock::time_point next_look_{};

  std::thread thread_;
};

}  // namespace lockstep::comm
