// Stream: a thread that does queued tasks in order, later than they were queued. Streams meet at points alone: a wait
// that is missing shows.
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

class Graph;

// A place in a stream: what an event stands for once it is recorded.
class Point {
 public:
  explicit Point(Clock clock) : recorded(false), clock(std::move(clock)) {}
  Point(Clock clock, std::weak_ptr<Graph> graph) : recorded(true), clock(std::move(clock)), graph(std::move(graph)) {}

  void pass();
  void wait();
  bool passed();
  std::chrono::steady_clock::time_point time();  // the time when it was passed

  const bool recorded;  // a place in a recording, which each replay has anew
  const Clock clock;
  const std::weak_ptr<Graph> graph;  // the graph that records it

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool passed_ = false;
  std::chrono::steady_clock::time_point time_;
};

class Stream {
 public:
  Stream(int device, int64_t id);

  void queue(std::function<void()> task);  // works also while the stream is recorded

  std::shared_ptr<Point> mark();                     // hold order()
  void follow(const std::shared_ptr<Point>& point);  // hold order()

  // The host waits. Throws what a task threw, and while the stream is recorded. finish() does not count as one of the
  // host's waits.
  void synchronize();
  void finish();

  bool idle();
  std::string name() const;

  const int device;
  const int64_t id;  // c10's, of this device
  const int number;  // its number among all streams
  // Guarded by order().
  Clock clock;
  Graph* recorder = nullptr;  // the graph that records what the stream is given

 private:
  void run();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  std::string failure_;
  bool started_ = false, busy_ = false;
};

}  // namespace simulated
