// TimedBackend: a c10d backend that hands allreduces on to another and notes how long its rank's threads spend on them.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <cstdint>
#include <memory>
#include <vector>

namespace lockstep::cli {

// What one rank's threads spent on allreduces since the last reset. A Reducer first posts and polls, while backward
// computes, and then waits: the first wait ends "within".
struct CommunicationTimes {
  double within = 0;        // seconds: posts and polls before the first wait
  double after = 0;         // seconds: all later ones, and waits
  int64_t bytes = 0;        // posted
  int64_t bytes_early = 0;  // of these, what polls had found complete before the first wait
  bool waited = false;
};

class TimedBackend : public c10d::Backend {
 public:
  TimedBackend(c10::intrusive_ptr<c10d::Backend> backend, std::shared_ptr<CommunicationTimes> times);

  const std::string getBackendName() const override { return backend_->getBackendName(); }
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override;
  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions& options) override;
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& options) override;

 private:
  const c10::intrusive_ptr<c10d::Backend> backend_;
  const std::shared_ptr<CommunicationTimes> times_;
};

}  // namespace lockstep::cli
