// TrainStep: one training step of a rank, from its part of a batch to new weights. There are three kinds of it.
//
//   plain      forward and backward, in options.batch.accumulate parts, and the update
//   recorded   full batches' steps are recorded once as a CUDA graph and replayed; others are plain or skipping
//   skipping   with `on_nan` "skip": a step that is not finite leaves everything as it was
#pragma once

#include <lockstep/split/split_model.hpp>
#include <lockstep/trainer/task.hpp>
#include <lockstep/trainer/trainer.hpp>

#include "data/row_numbers.hpp"
#include "devices/cuda_graph.hpp"
#include "finite_watch.hpp"
#include "replica_watch.hpp"
#include "totals.hpp"
#include "update.hpp"

#include <memory>

namespace lockstep {

// Has the objects that a step works with.
struct StepParts {
  const Task& task;
  const TrainOptions& options;
  const TrainCallbacks& callbacks;
  Rank rank;
  SplitModel net;
  Update& update;
  Totals& totals;
  FiniteWatch& watch;
  ReplicaWatch& replicas;
};

class TrainStep {
 public:
  virtual ~TrainStep() = default;

  // Call it on all ranks with parts of the same batch. The step counts in the totals, and the watch has seen it. If
  // the watch complains, nothing is updated.
  virtual void run(const Batch& batch) = 0;

  // Gives the numbers by which the step gathers full batches itself; null: it does not.
  virtual std::shared_ptr<RowNumbers> numbers() const { return nullptr; }
};

// Makes the kind of step that the options ask for; the recorded one if there is a `graph`. Throws Error if the graph
// would hold an exchange whose order nobody can learn.
std::unique_ptr<TrainStep> make_step(const StepParts& parts, std::unique_ptr<Graph> graph);

}  // namespace lockstep
