// Graph: what a program queued on a GPU once, kept by the driver, and queued again with one call.
//
// CMake takes cuda_graph.cpp or no_cuda_graph.cpp. The interface is abstract for GraphedStep's tests, whose stand-in
// runs where no GPU is.
#pragma once

#include <functional>
#include <memory>

namespace lockstep {

class Graph {
 public:
  virtual ~Graph() = default;

  // Calls work(), which queues on the calling thread's current stream and on streams that wait for it and that it waits
  // for again. Nothing of that runs; it is recorded. Once per Graph. Tensors that work() makes live as long as the
  // Graph. If work() throws, or does what cannot be recorded, that is thrown, and the Graph is good for nothing.
  virtual void record(const std::function<void()>& work) = 0;

  // Queues what was recorded on the current stream. It reads and writes the same memory as when it was recorded.
  virtual void replay() = 0;
};

// A CUDA graph of the calling thread's current device. Throws Error if this build has no CUDA parts.
std::unique_ptr<Graph> make_cuda_graph();

// Does the calling thread's current CUDA stream record now? What is recorded cannot be asked whether it is done.
// Only where there is a GPU.
bool is_recording();

}  // namespace lockstep
