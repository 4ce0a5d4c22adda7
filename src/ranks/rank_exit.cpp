#include "rank_exit.hpp"

#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <utility>

namespace lockstep {
namespace {

constexpr std::chrono::seconds kGrace{2};  // the time that the other ranks have to end at their next collective

[[noreturn]] void wait_for_the_end() {
  for (;;) ::pause();
}

}  // namespace

// A thread's Watch is destroyed when the thread ends. std::exit destroys it before everything else.
RankExit::Watch& RankExit::watch() {
  static thread_local Watch watch;
  return watch;
}

RankExit::Watch::~Watch() {
  if (run == nullptr) return;
  if (end_others) run->exits(end_others);
  run->ended();
}

void RankExit::enter(std::function<void()> end_others) {
  Watch& here = watch();  // made before the thread's other objects, and so destroyed after them
  std::unique_lock lock(mutex_);
  if (exiting_) {
    lock.unlock();
    wait_for_the_end();
  }
  ++running_;
  here.run = this;
  here.end_others = std::move(end_others);
}

void RankExit::leave() {
  watch().end_others = {};
}

void RankExit::ended() {
  const std::lock_guard lock(mutex_);
  --running_;
  changed_.notify_all();
}

void RankExit::exits(const std::function<void()>& end_others) {
  std::unique_lock lock(mutex_);
  if (std::exchange(exiting_, true)) {  // if two threads exit at once, the first one's status counts
    --running_;
    changed_.notify_all();
    lock.unlock();
    wait_for_the_end();
  }
  lock.unlock();
  end_others();
  lock.lock();
  if (changed_.wait_for(lock, kGrace, [&] { return running_ == 1; }) && !nested_) return;
  // std::exit calls this next, before anything is destroyed. Only a function of on_exit is told the status.
  ::on_exit(
      [](int status, void*) {
        std::fflush(nullptr);
        ::_exit(status);
      },
      nullptr);
}

}  // namespace lockstep
