// A stand-in for LibTorch's header of this name on simulated devices: see ../../ATen/cuda/CUDAGraph.h.
#pragma once

#include "simulated_gpu/device/device.hpp"
#include "simulated_gpu/device/launch.hpp"

namespace c10::cuda {

enum class CaptureStatus { None, Active };

inline CaptureStatus currentStreamCaptureStatusMayInitCtx() {
  const auto& stream = simulated::current_stream(simulated::current_device());
  return simulated::is_recorded(stream) ? CaptureStatus::Active : CaptureStatus::None;
}

}  // namespace c10::cuda
