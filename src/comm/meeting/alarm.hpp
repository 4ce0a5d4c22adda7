// Alarm: calls a function after some time, unless the Alarm is destroyed before. It is for calls that have no deadline
// of their own.
#pragma once

#include "base/start_thread.hpp"

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

namespace lockstep::comm {

class Alarm {
 public:
  // `ring` is called on a thread of the Alarm's own.
  Alarm(std::chrono::milliseconds time, std::function<void()> ring)
      : thread_(start_thread([this, time, ring = std::move(ring)] {
          std::unique_lock lock(mutex_);
          if (!changed_.wait_for(lock, time, [this] { return done_; })) ring();
        })) {}

  ~Alarm() {
    {
      const std::lock_guard lock(mutex_);
      done_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  Alarm(const Alarm&) = delete;
  Alarm& operator=(const Alarm&) = delete;

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
  std::thread thread_;  // last, since it uses the others
};

}  // namespace lockstep::comm
