// Graph: keeps work that a program queued on a GPU once. One call queues the work again.
//
// CMake takes cuda_graph.cpp or no_cuda_graph.cpp. The interface is abstract for GraphedStep's tests, which have no GPU
// and use a stand-in.
#pragma once

#include <functional>
#include <memory>

namespace lockstep {

class Graph {
 public:
  virtual ~Graph() = default;

  // Calls work(), whose queued work is recorded and not run. work() may queue on the calling thread's current stream,
  // and on streams that wait for that stream and are waited for again. Call record() once per Graph. Tensors that
  // work() makes live as long as the Graph. If work() throws, or calls something that cannot be recorded, record()
  // throws, and the Graph cannot be used.
  virtual void record(const std::function<void()>& work) = 0;

  // Queues the recorded work on the current stream. The work reads and writes the same memory as when it was recorded.
  virtual void replay() = 0;
};

// Makes a CUDA graph of the calling thread's current device. Throws Error if this build has no CUDA parts.
std::unique_ptr<Graph> make_cuda_graph();

// Tells whether the calling thread's current CUDA stream is recording now. Do not ask recorded work whether it is done.
// Call this only where there is a GPU.
bool is_recording();

}  // namespace lockstep
