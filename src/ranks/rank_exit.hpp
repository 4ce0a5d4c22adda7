// RankExit: lets a rank's thread call std::exit. That destroys what all threads use, LibTorch's own objects too, so the
// other ranks of the run have to end before.
#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>

namespace lockstep {

// Make one for each run() in this process. It is thread-safe.
class RankExit {
 public:
  // `nested` says that this is a run() inside of another run's rank.
  explicit RankExit(bool nested) : nested_(nested) {}

  // The calling thread is a rank until leave(). If it calls std::exit before that, std::exit calls end_others(), and
  // goes on when the other ranks' threads have ended. If they take too long, or the run is nested, the process ends at
  // once. It keeps the status and flushes C's streams, but does nothing else that std::exit does.
  void enter(std::function<void()> end_others);
  void leave();

 private:
  struct Watch {  // watches over a thread
    ~Watch();
    RankExit* run = nullptr;
    std::function<void()> end_others = {};  // empty: the thread has left
  };

  static Watch& watch();
  void ended();
  void exits(const std::function<void()>& end_others);

  const bool nested_;
  std::mutex mutex_;
  std::condition_variable changed_;
  int running_ = 0;       // the number of threads; guarded by mutex_
  bool exiting_ = false;  // one of the threads calls std::exit; guarded by mutex_
};

}  // namespace lockstep
