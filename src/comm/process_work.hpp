// ProcessWork: the c10d handle of one rank's call to ranks of other processes. A wait that fails says who is to blame.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include "comm/gloo_reduction.hpp"
#include "comm/vigil.hpp"

#include <memory>
#include <utility>
#include <vector>

namespace lockstep::comm {

class ProcessWork : public c10d::Work {
 public:
  // `result` are the tensors that hold the result once the work is complete. No timeout of its own: `timeout`.
  ProcessWork(c10d::OpType type, std::shared_ptr<Vigil> vigil, Vigil::Call call, Pending pending,
              std::chrono::milliseconds timeout, std::vector<at::Tensor> result)
      : Work(call.rank, type),
        vigil_(std::move(vigil)),
        call_(std::move(call)),
        pending_(std::move(pending)),
        timeout_(timeout),
        result_(std::move(result)) {}

  // Never waits for others. A message is complete once it was waited for. As c10d has it, a failed work is completed
  // too: see isSuccess() and exception().
  bool isCompleted() override {
    if (Work::isCompleted()) return true;
    if (pending_.work && !pending_.work->isCompleted()) return false;
    try {
      wait();
    } catch (...) {  // kept in exception()
    }
    return true;
  }

  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override {
    if (Work::isCompleted()) {
      if (!isSuccess()) std::rethrow_exception(exception());
      return true;
    }
    try {
      wait_for(timeout > kNoTimeout ? timeout : timeout_);
    } catch (...) {
      finishAndThrow(std::current_exception());
    }
    finish();
    return true;
  }

  void synchronize() override { wait(); }

  std::vector<at::Tensor> result() override { return result_; }

 private:
  void wait_for(std::chrono::milliseconds timeout) {
    const Vigil::Waiting waiting(*vigil_, call_);
    try {
      if (pending_.work) pending_.work->wait(timeout);
    } catch (...) {
      vigil_->explain(waiting, call_, std::current_exception(), timeout);
    }
    if (pending_.finish) pending_.finish();
  }

  const std::shared_ptr<Vigil> vigil_;
  const Vigil::Call call_;
  const Pending pending_;
  const std::chrono::milliseconds timeout_;
  const std::vector<at::Tensor> result_;
};

}  // namespace lockstep::comm
