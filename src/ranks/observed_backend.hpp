// An ObservedBackend is a c10d backend that passes every call on to another backend and tells observers of it.
#pragma once

#include <lockstep/ranks/rank.hpp>
#include <lockstep/ranks/traffic.hpp>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "comm/tree_average.hpp"

namespace lockstep {

// Hears of one rank's calls, on the thread that makes them.
class CallObserver {
 public:
  virtual ~CallObserver() = default;

  // A call among `ranks` ranks begins. `bytes` is the size of the tensor that is reduced, broadcast or sent. For a
  // gather or scatter it is the size of one rank's part, for an alltoall of the parts for all ranks, for a recv 0.
  virtual void posts(c10d::OpType type, int64_t bytes, int ranks) = 0;
  virtual void spent(double seconds) = 0;        // tells the seconds of posting a call, or of polling or waiting for it
  virtual void waits() {}                        // comes before the rank waits for a call
  virtual void found_complete(int64_t bytes) {}  // a poll found a call of so many bytes complete
};

using CallObservers = std::vector<std::shared_ptr<CallObserver>>;

// Gives a rank that does what `rank` does, and tells the observers of calls: the rank's own and those of groups made
// from it. Null entries of `observers` are left out.
Rank observed(const Rank& rank, CallObservers observers);

std::shared_ptr<CallObserver> observer_for(std::shared_ptr<Traffic> traffic);

int64_t bytes_in(const std::vector<at::Tensor>& tensors);  // an undefined tensor has no bytes

class ObservedBackend : public c10d::Backend, public comm::TreeBackend {
 public:
  using Tensors = std::vector<at::Tensor>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  ObservedBackend(c10::intrusive_ptr<c10d::Backend> backend, CallObservers observers);

  const std::string getBackendName() const override { return backend_->getBackendName(); }
  void setTimeout(std::chrono::milliseconds timeout) override { backend_->setTimeout(timeout); }
  void abort() override { backend_->abort(); }
  void shutdown() override { backend_->shutdown(); }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override;
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override;
  WorkPtr send(Tensors& tensors, int destination, int tag) override;
  WorkPtr recv(Tensors& tensors, int source, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                        std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& options) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;
  WorkPtr average_in_tree(const Tensors& rows, const comm::TreeAverage& average, at::Tensor target,
                          bool in_slices) override;

 private:
  bool averages_in_tree() const override { return TreeBackend::of(*backend_) != nullptr; }
  template <class Post>
  WorkPtr observe(c10d::OpType type, int64_t bytes, Post&& post);

  const c10::intrusive_ptr<c10d::Backend> backend_;
  const std::shared_ptr<const CallObservers> observers_;
};

}  // namespace lockstep
