// GraphedStep: a training step that at first is queued operation by operation, and later is recorded once and replayed.
// Recorded and the trainer's RecordedStep have one.
//
// A step of a small network is hundreds of short kernels. The host needs longer to queue the kernels than the GPU to
// run them. A replay queues all of them with one call. A recording fixes the shapes and addresses of all tensors. So a
// GraphedStep copies batches into tensors that stay, or the recorded work gathers each batch. Do batches of another
// size yourself.
#pragma once

#include <c10/core/Event.h>
#include <lockstep/data/data.hpp>
#include <lockstep/ranks/rank.hpp>

#include "data/row_numbers.hpp"
#include "devices/cuda_graph.hpp"

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>

namespace lockstep {

// This is the number of steps before the recording. These set up what must not be recorded: the reducer's order of
// buckets, cuBLAS's workspaces, NCCL's connections.
inline constexpr int kWarmUpSteps = 3;

// This is the number of replays that the host may queue ahead: enough that the GPU never waits for the host. A GPU
// whose queue is full would hold up the host where nothing ends its wait.
inline constexpr size_t kReplaysAhead = 32;

// Tells whether a graph can hold the rank's exchange: NCCL's. Our own needs host threads, since kernels of several
// ranks' graphs cannot wait for each other.
bool can_record_exchange(Rank& rank);

class GraphedStep {
 public:
  // `step` queues a step for a batch of `full_size` samples over all ranks. Make it do the same each time, and read no
  // tensor's value: its host code runs once, in the recording. `collective` says that it calls the rank's backend.
  // Then all ranks record at the same time, as NCCL needs. Otherwise the ranks record one after the other, because
  // ranks that share a GPU share its random number generator, which records one graph at a time.
  // If `numbers` are there, the graph gathers its batches, in this memory format.
  GraphedStep(Rank& rank, std::unique_ptr<Graph> graph, int64_t full_size, bool collective,
              std::function<void(const Batch&)> step, std::shared_ptr<RowNumbers> numbers = nullptr,
              at::MemoryFormat format = at::MemoryFormat::Contiguous);

  // Calls `before`, then queues the step for `batch`, and returns true. Returns false in the first kWarmUpSteps steps,
  // and for batches of another size: then do the step yourself. Call it on all ranks, with parts of the same batches.
  // Layers that draw by the step draw by `number`, SampleScope::Place::step.
  // Throws Error, which names the rank, if the step cannot be recorded, if the batch's tensors are not like the
  // recorded batch's, if the run has failed, or if an earlier replay is not done within the run's timeout.
  bool replay(
      const Batch& batch, int64_t number, const std::function<void()>& before = [] {});

 private:
  bool gathers() const { return numbers_ && numbers_->are_there(); }
  void take(const Batch& batch);
  void check(const Batch& batch) const;
  void record(const Batch& batch);
  void stay_near();

  Rank rank_;
  const std::unique_ptr<Graph> graph_;
  const int64_t full_size_;
  const bool collective_;
  const std::function<void(const Batch&)> step_;
  const std::shared_ptr<RowNumbers> numbers_;
  const at::MemoryFormat format_;
  const at::Tensor step_number_;  // the step's number, int64 [] on the device
  bool draws_ = false;            // layers draw by the step's number
  int warm_up_left_ = kWarmUpSteps;
  Batch input_;                  // the batch that the graph reads; undefined before the recording
  std::deque<c10::Event> ends_;  // ends of the last replays
  std::string failure_;          // why the recording failed; empty: it did not
};

}  // namespace lockstep
