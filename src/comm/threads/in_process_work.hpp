// InProcessWork is the c10d handle of one rank's call. Whoever waits or polls works on the operation.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include "exchange.hpp"

#include <utility>

namespace lockstep::comm {

class InProcessWork : public c10d::Work {
 public:
  // `result` are the tensors that hold the result once the work is complete.
  InProcessWork(int rank, c10d::OpType type, std::shared_ptr<Exchange> exchange, std::shared_ptr<Operation> operation,
                std::chrono::milliseconds timeout, std::vector<at::Tensor> result)
      : Work(rank, type),
        exchange_(std::move(exchange)),
        operation_(std::move(operation)),
        timeout_(timeout),
        result_(std::move(result)) {}

  // Never blocks. As c10d has it, a failed work is completed too: see isSuccess() and exception().
  bool isCompleted() override {
    if (Work::isCompleted()) return true;
    try {
      if (!exchange_->test(*operation_, rank_, timeout_)) return false;
      finish();
    } catch (...) {
      finish(std::current_exception());
    }
    return true;
  }

  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override {
    if (Work::isCompleted() && !isSuccess()) std::rethrow_exception(exception());
    try {
      exchange_->wait(*operation_, rank_, timeout > kNoTimeout ? timeout : timeout_);
    } catch (...) {
      finishAndThrow(std::current_exception());
    }
    finish();
    return true;
  }

  void synchronize() override { wait(); }

  std::vector<at::Tensor> result() override { return result_; }

  int sourceRank() const override {  // call it once the work is complete
    return opType_ == c10d::OpType::RECV || opType_ == c10d::OpType::RECVANYSOURCE ? operation_->source()
                                                                                   : Work::sourceRank();
  }

 private:
  const std::shared_ptr<Exchange> exchange_;
  const std::shared_ptr<Operation> operation_;
  const std::chrono::milliseconds timeout_;
  const std::vector<at::Tensor> result_;
};

}  // namespace lockstep::comm
