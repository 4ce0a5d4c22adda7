// A stand-in for LibTorch's CUDAGraph on simulated devices, under its name, so that lockstep's cuda_graph.cpp compiles
// and runs as it is.
//
// It is as LibTorch has it: the default generator of the device takes part in each of these calls, and nothing guards
// it against a second thread. It takes part in one recording at a time.
#pragma once

#include <c10/core/Allocator.h>

#include <memory>

#include "simulated_gpu/device/graph.hpp"

enum cudaStreamCaptureMode {
  cudaStreamCaptureModeGlobal,
  cudaStreamCaptureModeThreadLocal,
  cudaStreamCaptureModeRelaxed
};

namespace at::cuda {

struct CUDAGraph {
  CUDAGraph() = default;
  ~CUDAGraph();
  CUDAGraph(const CUDAGraph&) = delete;
  CUDAGraph& operator=(const CUDAGraph&) = delete;

  void capture_begin(c10::MempoolId_t pool, cudaStreamCaptureMode mode);
  void capture_end();
  void replay();

 private:
  std::shared_ptr<simulated::Graph> graph_;
  int device_ = 0;
  bool is_recording_ = false;
};

}  // namespace at::cuda
