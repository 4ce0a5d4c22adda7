// Transfer: the handle of one call of a simulated group. Waiting behaves as Gloo's waits do.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include "network.hpp"

#include <algorithm>
#include <chrono>
#include <exception>
#include <stdexcept>
#include <string>

namespace lockstep::simulation {

class Transfer : public c10d::Work {
 public:
  explicit Transfer(int source = -1, bool is_message = false) : source_(source), is_message_(is_message) {}

  // A message is complete once somebody has waited for it, as with c10d's handles.
  bool isCompleted() override {
    network().scheduler.point();
    return done_ && !is_message_;
  }

  bool wait(std::chrono::milliseconds timeout) override {
    Scheduler& scheduler = network().scheduler;
    scheduler.point();
    const Time longest = 1'000'000 * kSecond;
    const Time deadline = scheduler.now() + std::min<Time>(timeout.count(), longest / kMillisecond) * kMillisecond;
    while (!done_ && !aborted_) {
      if (!scheduler.wait(this, deadline) && scheduler.now() >= deadline) throw std::runtime_error("timed out");
    }
    if (aborted_) {
      aborted_ = false;  // this wait alone
      return false;
    }
    if (error_) std::rethrow_exception(error_);
    return true;
  }

  void abort() override {
    aborted_ = true;
    network().scheduler.wake_all(this);
  }

  int sourceRank() const override { return source_; }

  void complete() {
    done_ = true;
    network().scheduler.wake_all(this);
  }
  void fail(const std::string& why) {
    error_ = std::make_exception_ptr(std::runtime_error(why));
    complete();
  }
  bool is_over() const { return done_; }

 private:
  const int source_;
  const bool is_message_;
  bool done_ = false, aborted_ = false;
  std::exception_ptr error_;
};

}  // namespace lockstep::simulation
