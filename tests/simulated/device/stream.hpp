// Stream: a thread that does its tasks in the order in which they were queued, later than they were queued. Streams
// meet at points alone: a wait that is missing shows.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "order.hpp"

namespace simulated {

// A place in a stream: what an event stands for once it is recorded.
class Point {
 public:
  explicit Point(Clock clock) : clock(std::move(clock)) {}

  void pass();
  void wait();
  bool passed();
  std::chrono::steady_clock::time_point time();  // of passing

  const Clock clock;

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool passed_ = false;
  std::chrono::steady_clock::time_point time_;
};

class Stream {
 public:
  Stream(int device, int64_t id);

  void queue(std::function<void()> task);

  std::shared_ptr<Point> mark();                     // with order()
  void follow(const std::shared_ptr<Point>& point);  // with order()

  // The host waits. Throws what a task threw. finish() does not count as one of the host's waits.
  void synchronize();
  void finish();

  bool idle();
  std::string name() const;

  const int device;
  const int64_t id;  // c10's, of this device
  const int number;  // of all streams
  Clock clock;       // guarded by order()

 private:
  void run();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  std::string failure_;
  bool started_ = false, busy_ = false;
};

}  // namespace simulated
