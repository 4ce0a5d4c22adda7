// GraphedStep: a training step that is queued step by step at first, then recorded once and replayed.
//
// A step of a small network is hundreds of short kernels, and the host needs longer to queue them than the GPU to run
// them. A replay queues all of them with one call. What is recorded is fixed: the shapes, and where every tensor lies.
// So batches are copied into tensors of its own, and a batch of another size is left to the caller.
#pragma once

#include <lockstep/data/data.hpp>
#include <lockstep/ranks/rank.hpp>

#include "devices/cuda_graph.hpp"

#include <cstdint>
#include <functional>
#include <memory>

namespace lockstep {

// Steps before the recording: they set up what is set up once (the reducer's order of buckets, cuBLAS's workspaces,
// NCCL's connections), which must not be recorded.
inline constexpr int kWarmUpSteps = 3;

class GraphedStep {
 public:
  // `step` queues a step for a batch of `full_size` samples over all ranks, and must do the same each time: host code
  // in it runs when it is recorded and not again, so it must not read a tensor's value. `collective`: it calls the
  // rank's backend. Then all ranks record at the same time, as NCCL wants it; otherwise one after the other, because
  // ranks that share a GPU share its random numbers' generator, which records one graph at a time.
  GraphedStep(Rank& rank, std::unique_ptr<Graph> graph, int64_t full_size, bool collective,
              std::function<void(const Batch&)> step);

  // Queues the step for `batch` and returns true; or returns false, and the caller has to do it: the first kWarmUpSteps
  // steps, and batches of another size. All ranks must call it, with parts of the same batches. Throws Error that names
  // the rank if the step cannot be recorded.
  bool replay(const Batch& batch);

 private:
  void record(const Batch& batch);

  Rank rank_;
  const std::unique_ptr<Graph> graph_;
  const int64_t full_size_;
  const bool collective_;
  const std::function<void(const Batch&)> step_;
  int warm_up_left_ = kWarmUpSteps;
  Batch input_;  // what the graph reads; undefined before the recording
};

}  // namespace lockstep
