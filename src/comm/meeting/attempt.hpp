// Attempt: connects a group, or takes one down, on a thread of its own, since Gloo and NCCL cannot be called off
// meanwhile. A caller that no longer wants the result leaves the thread alone. The thread ends soon if it waits in the
// store, or else at Gloo's timeout or with the process. All calls are thread-safe.
#pragma once

#include "base/signals.hpp"
#include "base/start_thread.hpp"
#include "comm/group_member.hpp"

#include <chrono>
#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <stop_token>
#include <utility>

namespace lockstep::comm {

class Attempt {
 public:
  // Let `connect` own all that it uses. Its argument says whether the attempt was called off. Throws Error if no thread
  // can be started.
  static std::shared_ptr<Attempt> start(std::function<GroupMember(std::stop_token)> connect) {
    auto attempt = std::make_shared<Attempt>();
    start_thread([attempt, connect = std::move(connect)] {
      const SignalBlocked sigpipe_blocked(SIGPIPE);  // holds here and in the threads that the group starts
      std::optional<GroupMember> group;
      std::exception_ptr exception;
      try {
        group = connect(attempt->called_off_.get_token());
      } catch (...) {
        exception = std::current_exception();
      }
      attempt->end(std::move(group), std::move(exception));
    }).detach();
    return attempt;
  }

  // Waits until the attempt has ended or wake() was called, and for at most `time`. Gives the group in the first case
  // only. Throws what `connect` threw.
  std::optional<GroupMember> wait(std::chrono::microseconds time = std::chrono::hours(24)) {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, time, [this] { return group_ || exception_ || woken_; });
    if (exception_) std::rethrow_exception(exception_);
    woken_ = false;
    return std::exchange(group_, {});
  }

  // Closes the group, also one that is connected later.
  void call_off() {
    called_off_.request_stop();
    std::optional<GroupMember> group;
    {
      const std::lock_guard lock(mutex_);
      group = std::exchange(group_, {});
    }
    close(group);
  }

  void wake() {
    {
      const std::lock_guard lock(mutex_);
      woken_ = true;
    }
    changed_.notify_all();
  }

 private:
  void end(std::optional<GroupMember> group, std::exception_ptr exception) {
    std::optional<GroupMember> unwanted;
    {
      const std::lock_guard lock(mutex_);
      (called_off_.stop_requested() ? unwanted : group_) = std::move(group);
      exception_ = std::move(exception);
    }
    changed_.notify_all();
    close(unwanted);
  }

  static void close(const std::optional<GroupMember>& group) {
    if (group && group->close) group->close();
  }

  std::stop_source called_off_;
  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  bool woken_ = false;
  std::optional<GroupMember> group_;
  std::exception_ptr exception_;
};

}  // namespace lockstep::comm
