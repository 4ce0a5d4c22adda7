// Vigil: what the processes of a run know of each other while they work, so that nothing waits for ever.
//
// One thread per process and run; ten times a second it says in the store that its process lives, and looks whether a
// rank has failed. Only while one of its own ranks has waited for long does it look around further: whose heart has
// stopped, who has returned, whose call differs. The first failure of the whole job is final, everywhere the same text,
// and ends every present and later wait of every rank. The loss of a process that the others can do without (losses) is
// no failure: it ends only what waits for that process.
//
// Once the user has asked for a stop, a rank that goes on waiting while no process of the run does anything is a
// failure too: "stopped by request".
//
// Keys in the store: failure (the text), where (a rank was when a process died), beat/<process> (two counts: of beats,
// and of its activity), state/<rank> (what it waits in, or that it has returned), calls/<rank> (what it had called when
// it returned), done (a count of processes). Thread-safe.
#pragma once

#include "activity.hpp"
#include "calls.hpp"
#include "comm/meeting/layout.hpp"
#include "comm/meeting/rendezvous.hpp"
#include "losses.hpp"
#include "rank_state.hpp"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <stop_token>
#include <string>
#include <thread>
#include <vector>

namespace lockstep::comm {

class Vigil {
 public:
  using Clock = std::chrono::steady_clock;

  struct Options {
    std::chrono::milliseconds timeout;  // of the run's calls
    std::chrono::milliseconds silence;  // without a sign of life, until a process counts as dead
    std::string host;                   // who keeps the store, in words, for when it is gone
    bool keep_going = false;            // processes may be lost
    std::stop_token stop = {};
  };

  // `store` is the vigil's own connection.
  Vigil(StorePtr store, Layout layout, int process, Options options);
  ~Vigil();
  Vigil(const Vigil&) = delete;
  Vigil& operator=(const Vigil&) = delete;

  // From now on; `on_failure` is called once, from the vigil's thread.
  void start(std::function<void()> on_failure);
  void stop();  // on_failure is not called any more

  // Says that a rank of this process failed. If another rank was first, its text stays.
  void report(const std::string& text);
  std::string failure() const;  // empty while all is well

  CallLog& log() { return log_; }  // of this process's ranks; of none on GPUs
  void returned(int rank);         // the rank is done
  void stepped(int64_t steps);     // of training are done by now, as a rank counts them

  // From release() to bind() the others can do without this rank of this process. bind() throws Error if they have gone
  // on without the process.
  void release(int rank);
  void bind(int rank);
  Losses& losses() { return losses_; }

  // A rank waits in a call while the object lives. `interrupt` makes its wait look whether it is in vain: it is called
  // from any thread, when the run has failed or a process was lost.
  class Waiting {
   public:
    Waiting(Vigil& vigil, OpenCall call, std::function<void()> interrupt = {});
    ~Waiting();
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;
    Clock::time_point since() const { return since_; }

   private:
    Vigil& vigil_;
    uint64_t id_;
    Clock::time_point since_;
  };

  // A wait ended with `cause`, after its deadline or before: finds out who is to blame, reports it and throws it. Of a
  // message whose other side was lost nothing is reported, and PeerLost thrown.
  [[noreturn]] void explain(const Waiting& waiting, const OpenCall& call, const std::exception_ptr& cause,
                            std::chrono::milliseconds timeout);

  // This process's ranks are done: waits until all processes' are, or until there is a failure; the failure's text, and
  // if that is a process's death, where one of the others' ranks was. A call that came about on some ranks only is a
  // failure.
  std::string finish();

  bool store_is_lost() const { return lost_; }
  const Layout& layout() const { return layout_; }

 private:
  struct Open {
    OpenCall call;
    Clock::time_point since;
    std::function<void()> interrupt;
  };

  struct Beat {
    int64_t count = 0;  // of the process's beats; 0: none yet
    int64_t activity = 0;
  };

  void run();
  void beat();
  std::string own_beat();
  void look_around();
  void publish(const std::map<uint64_t, Open>& open);
  void watch_hearts();
  bool must_look_around(std::map<uint64_t, Open>& open);
  Clock::duration patience_with_silence() const;
  std::vector<Beat> beats();
  void end_waits_of_a_stop(const std::vector<RankState>& states);
  void set_failure(const std::string& text);
  void interrupt_waits();  // mutex_ is held
  void lose_store();
  std::vector<std::string> read_all(const std::string& what, int count);
  std::vector<RankState> states();
  std::string missing(const OpenCall& call);
  void note_where(const OpenCall& call);
  std::string last_words();
  void leave_calls();
  void check_calls();

  const StorePtr store_;
  const Layout layout_;
  const int process_;
  const Clock::duration patience_;  // a wait that lasts longer is looked into
  const Options options_;
  std::function<void()> on_failure_;
  CallLog log_;
  Losses losses_;

  // Of the vigil's thread alone.
  std::map<int, std::string> published_;
  Activity activity_;
  int64_t own_beats_ = 0;
  std::vector<Beat> beats_;              // by process, when last seen
  std::vector<Clock::time_point> seen_;  // when the count had changed
  Clock::time_point last_beat_ = Clock::now();
  Clock::time_point active_{};      // when some process's activity had
  Clock::time_point stop_asked_{};  // when this was seen; not yet: the epoch
  Clock::time_point next_look_{};

  std::atomic<bool> lost_ = false;  // the store does not answer
  std::atomic<int64_t> steps_ = 0;  // 0: nobody counts them

  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::string failure_;
  std::string where_;  // a rank of this process was when it learned of that
  std::map<uint64_t, Open> open_;
  std::set<int> returned_;  // ranks
  int64_t moves_ = 0;       // begins and ends of waits
  uint64_t next_id_ = 0;
  int suspicions_ = 0;  // ranks whose connection was closed and that want to know by whom
  bool finishing_ = false;
  bool stop_ = false;

  std::thread thread_;
};

}  // namespace lockstep::comm
