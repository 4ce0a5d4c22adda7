#include "timed_backend.hpp"

#include <chrono>
#include <utility>

namespace lockstep::cli {

namespace {

using Clock = std::chrono::steady_clock;

// Calls function() and adds the time that it took to where it belongs.
template <class Function>
auto timed(CommunicationTimes& times, Function&& function) {
  const auto start = Clock::now();
  auto result = function();
  (times.ended ? times.after : times.within) += std::chrono::duration<double>(Clock::now() - start).count();
  return result;
}

class TimedWork : public c10d::Work {
 public:
  TimedWork(c10::intrusive_ptr<c10d::Work> work, std::shared_ptr<CommunicationTimes> times, int64_t bytes)
      : work_(std::move(work)), times_(std::move(times)), bytes_(bytes) {}

  bool isCompleted() override {
    const bool completed = timed(*times_, [&] { return work_->isCompleted(); });
    if (completed && !times_->ended) times_->bytes_early += std::exchange(bytes_, 0);
    return completed;
  }
  bool wait(std::chrono::milliseconds timeout) override {
    times_->ended = true;
    return timed(*times_, [&] { return work_->wait(timeout); });
  }
  bool isSuccess() const override { return work_->isSuccess(); }
  std::exception_ptr exception() const override { return work_->exception(); }
  void synchronize() override { work_->synchronize(); }

 private:
  const c10::intrusive_ptr<c10d::Work> work_;
  const std::shared_ptr<CommunicationTimes> times_;
  int64_t bytes_;
};

}  // namespace

TimedBackend::TimedBackend(c10::intrusive_ptr<c10d::Backend> backend, std::shared_ptr<CommunicationTimes> times)
    : Backend(backend->getRank(), backend->getSize()), backend_(std::move(backend)), times_(std::move(times)) {}

c10::intrusive_ptr<c10d::Work> TimedBackend::allreduce(std::vector<at::Tensor>& tensors,
                                                       const c10d::AllreduceOptions& options) {
  int64_t bytes = 0;
  for (const auto& tensor : tensors) bytes += static_cast<int64_t>(tensor.nbytes());
  times_->bytes += bytes;
  times_->ended = times_->ended || times_->bytes >= times_->bytes_of_step;
  auto work = timed(*times_, [&] { return backend_->allreduce(tensors, options); });
  return c10::make_intrusive<TimedWork>(std::move(work), times_, bytes);
}

c10::intrusive_ptr<c10d::Work> TimedBackend::broadcast(std::vector<at::Tensor>& tensors,
                                                       const c10d::BroadcastOptions& options) {
  return backend_->broadcast(tensors, options);
}

c10::intrusive_ptr<c10d::Work> TimedBackend::barrier(const c10d::BarrierOptions& options) {
  return backend_->barrier(options);
}

}  // namespace lockstep::cli
