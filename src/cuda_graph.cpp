#include "cuda_graph.hpp"

#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>

namespace lockstep {
namespace {

class CudaGraph : public Graph {
 public:
  void record(const std::function<void()>& work) override {
    // Thread-local: calls of other threads (another rank's allocations, NCCL's watchdog) are no fault of this
    // recording.
    graph_.capture_begin(/*pool=*/{0, 0}, cudaStreamCaptureModeThreadLocal);
    try {
      work();
    } catch (...) {
      abandon();
      throw;
    }
    graph_.capture_end();
  }

  void replay() override { graph_.replay(); }

 private:
  // Takes the stream out of recording, which has failed already: a second complaint adds nothing.
  void abandon() noexcept {
    try {
      graph_.capture_end();
    } catch (...) {
    }
  }

  at::cuda::CUDAGraph graph_;  // registers the device's default generator by itself, so that random numbers go on
};

}  // namespace

std::unique_ptr<Graph> make_cuda_graph() {
  return std::make_unique<CudaGraph>();
}

bool is_recording() {
  return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
}

}  // namespace lockstep
