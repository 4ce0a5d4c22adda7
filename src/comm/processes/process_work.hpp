// A ProcessWork is the c10d handle of one rank's call to ranks of other processes. A wait that fails says who is to
// blame.
#pragma once

#include <lockstep/base/error.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "gloo_reduction.hpp"
#include "monitor.hpp"

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

namespace lockstep::comm {

class ProcessWork;

// OpenWorks has the works of one rank's backend whose end nobody has seen yet, each kind in the order of the calls. So
// works that nobody waits for are done too: collective calls before the next one that is waited for, and all at the end
// of the run. All calls are thread-safe.
class OpenWorks {
 public:
  using Works = std::vector<c10::intrusive_ptr<ProcessWork>>;

  void add(c10::intrusive_ptr<ProcessWork> work);
  void remove(const ProcessWork& work);
  Works collectives_before(const ProcessWork& work) const;
  Works all() const;

 private:
  mutable std::mutex mutex_;      // guards the rest
  Works collectives_, messages_;  // apart, since a program may leave messages open until the end
};

class ProcessWork : public c10d::Work {
 public:
  // `rank` is the calling rank's number in its group, as in c10d. `result` are the tensors that hold the result once
  // the work is complete. `timeout` holds for waits without a timeout of their own.
  ProcessWork(int rank, c10d::OpType type, std::shared_ptr<Monitor> monitor, OpenCall call, Pending pending,
              std::chrono::milliseconds timeout, std::vector<at::Tensor> result, std::weak_ptr<OpenWorks> open)
      : Work(rank, type),
        monitor_(std::move(monitor)),
        call_(std::move(call)),
        pending_(std::move(pending)),
        timeout_(timeout),
        result_(std::move(result)),
        open_(std::move(open)) {}

  // Never waits for others, but ends as wait() does: at the timeout, or when the run has failed. A message is complete
  // only after wait(). As c10d has it, a failed work is completed too: see isSuccess() and exception().
  bool isCompleted() override {
    if (Work::isCompleted()) return true;
    try {
      const auto earlier = collectives_before();
      if (!has_come() || !std::all_of(earlier.begin(), earlier.end(), [](auto& work) { return work->has_come(); })) {
        throw_if_hopeless();
        return false;
      }
      wait();
    } catch (...) {
      note_end();
      if (!Work::isCompleted()) finish(std::current_exception());
    }
    return true;
  }

  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override {
    if (Work::isCompleted()) {
      if (!isSuccess()) std::rethrow_exception(exception());
      return true;
    }
    const auto limit = timeout > kNoTimeout ? timeout : timeout_;
    const auto begin = std::chrono::steady_clock::now();
    const auto left = [&] {  // the rest of the caller's timeout, which holds for the earlier calls too
      const auto waited = std::chrono::steady_clock::now() - begin;
      return std::max(limit - std::chrono::duration_cast<std::chrono::milliseconds>(waited),
                      std::chrono::milliseconds(1));
    };
    try {
      for (const auto& work : collectives_before()) work->wait(left());
      wait_for(left());
    } catch (...) {
      note_end();
      finishAndThrow(std::current_exception());
    }
    note_end();
    finish();
    return true;
  }

  void synchronize() override { wait(); }

  std::vector<at::Tensor> result() override { return result_; }

  int sourceRank() const override {
    const bool receives = opType_ == c10d::OpType::RECV || opType_ == c10d::OpType::RECVANYSOURCE;
    return receives ? pending_.work->sourceRank() : Work::sourceRank();
  }

  bool is_collective() const { return call_.number >= 0; }

 private:
  bool has_come() const { return pending_.work->isCompleted(); }

  OpenWorks::Works collectives_before() const {
    const auto open = open_.lock();
    return open && is_collective() ? open->collectives_before(*this) : OpenWorks::Works();
  }

  void note_end() {
    if (const auto open = open_.lock()) open->remove(*this);
  }

  void wait_for(std::chrono::milliseconds timeout) {
    polled_.reset();  // a rank that waits cannot go on by itself, while one that polls may
    const Monitor::Waiting waiting(*monitor_, call_, timeout, interrupt());
    try {
      if (is_collective()) {
        pending_.work->wait(monitor_->failed() ? kUntilClosed : kUntilItComes);
      } else {
        do {
          if (!monitor_->failure().empty()) throw Error("the run has failed");
        } while (!pending_.work->wait(kUntilItComes));
      }
    } catch (...) {
      monitor_->explain(waiting, call_, std::current_exception());
    }
    if (is_collective()) monitor_->log().complete(call_.rank, call_.among.name, call_.number);
    if (!pending_.finish) return;
    try {
      pending_.finish();
    } catch (...) {
      monitor_->report_own(call_, std::current_exception());
      monitor_->explain(waiting, call_, std::current_exception());
    }
  }

  // A wait for a message is interrupted to look again. One for a collective call ends with its connections.
  std::function<void()> interrupt() const {
    if (is_collective()) return {};
    return [work = pending_.work.get()] { work->abort(); };
  }

  // The monitor watches over a call that is polled as if the rank waited.
  void throw_if_hopeless() {
    if (!polled_) {
      OpenCall call = call_;
      call.polled = true;
      polled_.emplace(*monitor_, std::move(call), timeout_);
    }
    const bool late = polled_->is_late();
    if (late && call_.is_message()) {
      throw Error(monitor_->roster().name(call_.rank) + ": " + call_.where() +
                  " was only polled: between processes a message completes in wait()");
    }
    if (late || !monitor_->failure().empty()) monitor_->explain(*polled_, call_, nullptr);
  }

  const std::shared_ptr<Monitor> monitor_;
  const OpenCall call_;
  const Pending pending_;
  const std::chrono::milliseconds timeout_;
  const std::vector<at::Tensor> result_;
  const std::weak_ptr<OpenWorks> open_;
  std::optional<Monitor::Waiting> polled_;  // began with the first poll that found the call open
};

inline void OpenWorks::add(c10::intrusive_ptr<ProcessWork> work) {
  const std::lock_guard lock(mutex_);
  (work->is_collective() ? collectives_ : messages_).push_back(std::move(work));
}

inline void OpenWorks::remove(const ProcessWork& work) {
  const std::lock_guard lock(mutex_);
  std::erase_if(work.is_collective() ? collectives_ : messages_, [&](const auto& one) { return one.get() == &work; });
}

inline OpenWorks::Works OpenWorks::collectives_before(const ProcessWork& work) const {
  Works earlier;
  const std::lock_guard lock(mutex_);
  for (const auto& one : collectives_) {
    if (one.get() == &work) break;
    earlier.push_back(one);
  }
  return earlier;
}

inline OpenWorks::Works OpenWorks::all() const {
  const std::lock_guard lock(mutex_);
  Works all = collectives_;
  all.insert(all.end(), messages_.begin(), messages_.end());
  return all;
}

}  // namespace lockstep::comm
