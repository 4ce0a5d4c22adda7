#include "cuda_graph.hpp"

#include <ATen/cuda/CUDAGraph.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>

#include <array>
#include <limits>
#include <mutex>
#include <optional>
#include <utility>

namespace lockstep {
namespace {

// This mutex guards a GPU's default generator. A graph registers with the generator when recorded, moves it on with
// each replay, and unregisters when destroyed. LibTorch guards little of that against ranks that share a GPU. Each GPU
// needs its own mutex: a full queue can hold up a replay until other GPUs' ranks have queued theirs.
std::mutex& generator_of(c10::DeviceIndex device) {
  static std::array<std::mutex, std::numeric_limits<c10::DeviceIndex>::max() + 1> mutexes;
  return mutexes.at(device);
}

class CudaGraph : public Graph {
 public:
  ~CudaGraph() override {
    const std::lock_guard lock(generator_);
    graph_.reset();
  }

  void record(const std::function<void()>& work) override {
    // The mode is thread-local: calls of other threads (another rank's allocations, NCCL's watchdog) do not spoil this
    // recording.
    begin();
    try {
      work();
    } catch (...) {
      abandon();
      throw;
    }
    end();
  }

  void replay() override {
    const std::lock_guard lock(generator_);
    graph_->replay();
  }

 private:
  // The lock is not held during the whole recording, in which NCCL's ranks wait for each other.
  void begin() {
    const std::lock_guard lock(generator_);
    graph_->capture_begin(/*pool=*/{0, 0}, cudaStreamCaptureModeThreadLocal);
  }
  void end() {
    const std::lock_guard lock(generator_);
    graph_->capture_end();
  }

  // Takes the stream out of recording. The recording has failed already, so a second complaint adds nothing.
  void abandon() noexcept {
    try {
      end();
    } catch (...) {
    }
  }

  std::mutex& generator_ = generator_of(c10::impl::VirtualGuardImpl(c10::kCUDA).getDevice().index());
  // The graph registers the device's default generator by itself, so that random numbers go on.
  std::optional<at::cuda::CUDAGraph> graph_{std::in_place};
};

}  // namespace

std::unique_ptr<Graph> make_cuda_graph() {
  return std::make_unique<CudaGraph>();
}

bool is_recording() {
  return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
}

}  // namespace lockstep
