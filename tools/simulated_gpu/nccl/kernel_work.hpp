// KernelWork: a call of NCCL's stand-in that is queued, as c10d's WorkNCCL. It is done when the stream has come so far,
// and keeps the tensors until somebody has waited.
#pragma once

#include <c10/core/Event.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <utility>
#include <vector>

#include "simulated_gpu/device/guard.hpp"

namespace c10d {

class KernelWork : public Work {
 public:
  KernelWork(int rank, OpType type, c10::Stream stream, std::vector<at::Tensor> stash, std::vector<at::Tensor> result)
      : Work(rank, type),
        event_(simulated::kType),
        stash_(std::move(stash)),
        result_(std::move(result)),
        host_waits_(type == OpType::BARRIER) {
    event_.record(stream);
  }

  bool isCompleted() override { return event_.query(); }
  bool wait(std::chrono::milliseconds) override {
    const auto stream = simulated::Guard().getStream(event_.device());
    event_.block(stream);
    stash_.clear();
    if (host_waits_) simulated::stream_of(stream).synchronize();
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }
  std::vector<at::Tensor> result() override { return result_; }

 private:
  c10::Event event_;
  std::vector<at::Tensor> stash_;
  const std::vector<at::Tensor> result_;
  const bool host_waits_;
};

}  // namespace c10d
