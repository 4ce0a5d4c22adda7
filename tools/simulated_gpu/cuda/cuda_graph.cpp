#include <ATen/cuda/CUDAGraph.h>

#include <array>
#include <atomic>
#include <limits>
#include <string>

#include "simulated_gpu/device/device.hpp"
#include "simulated_gpu/device/reports.hpp"

namespace at::cuda {
namespace {

// A device's default generator, as far as graphs use it.
struct GraphsGenerator {
  std::atomic<int> users = 0;
  std::atomic<bool> is_recording = false;
};

GraphsGenerator& generator_of(int device) {
  static std::array<GraphsGenerator, std::numeric_limits<c10::DeviceIndex>::max()> generators;
  return generators.at(static_cast<size_t>(device));
}

class GeneratorUse {
 public:
  explicit GeneratorUse(int device) : generator_(generator_of(device)) {
    if (generator_.users++ == 0) return;
    simulated::report("race: two threads use the default generator of device " + std::to_string(device) +
                      " for their graphs at once");
  }
  ~GeneratorUse() { --generator_.users; }
  GeneratorUse(const GeneratorUse&) = delete;
  GeneratorUse& operator=(const GeneratorUse&) = delete;

 private:
  GraphsGenerator& generator_;
};

}  // namespace

CUDAGraph::~CUDAGraph() {
  if (!graph_) return;
  const GeneratorUse use(device_);
  if (is_recording_) generator_of(device_).is_recording = false;
  graph_.reset();
}

void CUDAGraph::capture_begin(c10::MempoolId_t, cudaStreamCaptureMode mode) {
  TORCH_CHECK(!graph_, "This CUDAGraph instance already owns a captured graph");
  TORCH_CHECK(mode == cudaStreamCaptureModeThreadLocal, "the simulated device knows thread-local captures only");
  device_ = simulated::current_device();
  const GeneratorUse use(device_);
  TORCH_CHECK(!generator_of(device_).is_recording, "the default generator of device ", device_,
              " takes part in a capture already");
  graph_ = simulated::Graph::begin(simulated::current_stream(device_));
  generator_of(device_).is_recording = is_recording_ = true;
}

void CUDAGraph::capture_end() {
  TORCH_CHECK(is_recording_, "capture_end without capture_begin");
  const GeneratorUse use(device_);
  generator_of(device_).is_recording = false;
  is_recording_ = false;
  graph_->end();
}

void CUDAGraph::replay() {
  TORCH_CHECK(graph_ && !is_recording_, "Called CUDAGraph::replay without a preceding successful capture.");
  const GeneratorUse use(device_);
  graph_->replay(simulated::current_stream(device_));
}

}  // namespace at::cuda
