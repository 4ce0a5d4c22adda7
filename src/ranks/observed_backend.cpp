#include "observed_backend.hpp"

#include <utility>

#include "base/seconds_since.hpp"

namespace lockstep {

namespace {

using c10d::OpType;

// Calls function() and says how long the call took.
template <class Function>
auto timed(const CallObservers& observers, Function&& function) {
  const auto start = std::chrono::steady_clock::now();
  auto result = function();
  const double seconds = seconds_since(start);
  for (const auto& observer : observers) observer->spent(seconds);
  return result;
}

class ObservedWork : public c10d::Work {
 public:
  ObservedWork(c10::intrusive_ptr<c10d::Work> work, std::shared_ptr<const CallObservers> observers, int64_t bytes)
      : work_(std::move(work)), observers_(std::move(observers)), bytes_(bytes) {}

  bool isCompleted() override {
    if (!timed(*observers_, [&] { return work_->isCompleted(); })) return false;
    for (const auto& observer : *observers_) observer->found_complete(bytes_);
    bytes_ = 0;
    return true;
  }
  bool wait(std::chrono::milliseconds timeout) override {
    for (const auto& observer : *observers_) observer->waits();
    return timed(*observers_, [&] { return work_->wait(timeout); });
  }
  bool isSuccess() const override { return work_->isSuccess(); }
  std::exception_ptr exception() const override { return work_->exception(); }
  void synchronize() override { work_->synchronize(); }
  int sourceRank() const override { return work_->sourceRank(); }

 private:
  const c10::intrusive_ptr<c10d::Work> work_;
  const std::shared_ptr<const CallObservers> observers_;
  int64_t bytes_;
};

}  // namespace

int64_t bytes_in(const std::vector<at::Tensor>& tensors) {
  int64_t bytes = 0;
  for (const auto& tensor : tensors) bytes += tensor.defined() ? static_cast<int64_t>(tensor.nbytes()) : 0;
  return bytes;
}

using WorkPtr = ObservedBackend::WorkPtr;

Rank observed(const Rank& rank, CallObservers observers) {
  std::erase(observers, nullptr);
  if (observers.empty()) return rank;
  return rank.wrapped([observers = std::move(observers)](auto backend) {
    return c10::make_intrusive<ObservedBackend>(std::move(backend), observers);
  });
}

ObservedBackend::ObservedBackend(c10::intrusive_ptr<c10d::Backend> backend, CallObservers observers)
    : Backend(backend->getRank(), backend->getSize()),
      backend_(std::move(backend)),
      observers_(std::make_shared<const CallObservers>(std::move(observers))) {}

template <class Post>
WorkPtr ObservedBackend::observe(OpType type, int64_t bytes, Post&& post) {
  for (const auto& observer : *observers_) observer->posts(type, bytes, size_);
  return c10::make_intrusive<ObservedWork>(timed(*observers_, post), observers_, bytes);
}

WorkPtr ObservedBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  return observe(OpType::ALLREDUCE, bytes_in(tensors), [&] { return backend_->allreduce(tensors, options); });
}

WorkPtr ObservedBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  return observe(OpType::BROADCAST, bytes_in(tensors), [&] { return backend_->broadcast(tensors, options); });
}

WorkPtr ObservedBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                   const c10d::AllgatherOptions& options) {
  return observe(OpType::ALLGATHER, bytes_in(inputs), [&] { return backend_->allgather(outputs, inputs, options); });
}

WorkPtr ObservedBackend::_allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) {
  return observe(OpType::_ALLGATHER_BASE, static_cast<int64_t>(input.nbytes()),
                 [&] { return backend_->_allgather_base(output, input, options); });
}

WorkPtr ObservedBackend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                        const c10d::ReduceScatterOptions& options) {
  return observe(OpType::REDUCE_SCATTER, bytes_in(outputs),
                 [&] { return backend_->reduce_scatter(outputs, inputs, options); });
}

WorkPtr ObservedBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                              const c10d::ReduceScatterOptions& options) {
  return observe(OpType::_REDUCE_SCATTER_BASE, static_cast<int64_t>(output.nbytes()),
                 [&] { return backend_->_reduce_scatter_base(output, input, options); });
}

WorkPtr ObservedBackend::send(Tensors& tensors, int destination, int tag) {
  return observe(OpType::SEND, bytes_in(tensors), [&] { return backend_->send(tensors, destination, tag); });
}

WorkPtr ObservedBackend::recv(Tensors& tensors, int source, int tag) {
  return observe(OpType::RECV, 0, [&] { return backend_->recv(tensors, source, tag); });
}

WorkPtr ObservedBackend::recvAnysource(Tensors& tensors, int tag) {
  return observe(OpType::RECVANYSOURCE, 0, [&] { return backend_->recvAnysource(tensors, tag); });
}

WorkPtr ObservedBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  return observe(OpType::REDUCE, bytes_in(tensors), [&] { return backend_->reduce(tensors, options); });
}

WorkPtr ObservedBackend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) {
  return observe(OpType::ALLTOALL, bytes_in(inputs), [&] { return backend_->alltoall(outputs, inputs, options); });
}

WorkPtr ObservedBackend::alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                                       std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& options) {
  return observe(OpType::ALLTOALL_BASE, static_cast<int64_t>(input.nbytes()),
                 [&] { return backend_->alltoall_base(output, input, output_sizes, input_sizes, options); });
}

WorkPtr ObservedBackend::barrier(const c10d::BarrierOptions& options) {
  return observe(OpType::BARRIER, 0, [&] { return backend_->barrier(options); });
}

WorkPtr ObservedBackend::average_in_tree(const Tensors& rows, const comm::TreeAverage& average, at::Tensor target,
                                         bool in_slices) {
  return observe(in_slices ? OpType::REDUCE_SCATTER : OpType::ALLREDUCE, static_cast<int64_t>(target.nbytes()),
                 [&] { return TreeBackend::of(*backend_)->average_in_tree(rows, average, target, in_slices); });
}

}  // namespace lockstep
