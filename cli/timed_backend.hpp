// TimedBackend: a c10d backend that hands allreduces on to another and notes how long its rank's threads spend on them.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <cstdint>
#include <memory>
#include <vector>

namespace lockstep::cli {

// What one rank's threads spent on the allreduces of a step. While backward computes, a Reducer posts and polls; the
// post of the last bytes comes with backward's last gradient, so what follows it is spent after backward.
struct CommunicationTimes {
  int64_t bytes_of_step = 0;  // how much is posted in a step
  double within = 0;          // seconds: posts and polls during backward
  double after = 0;           // seconds: later ones, and waits
  int64_t bytes = 0;          // posted
  int64_t bytes_early = 0;    // of these, what polls found complete during backward
  bool ended = false;         // backward
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
