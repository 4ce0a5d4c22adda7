// KeptRun keeps a run's folder and TensorBoard's log, and tells the caller of each epoch once. One process at a time
// keeps the run, the one with index 0. In an elastic job that process may be gone, and another one takes over.
#pragma once

#include <torch/nn/module.h>
#include <lockstep/trainer/trainer.hpp>

#include "io/tfevents.hpp"
#include "measures.hpp"
#include "run_folder.hpp"
#include "run_notes.hpp"
#include "run_state.hpp"
#include "workload.hpp"

#include <cstdint>
#include <optional>
#include <vector>

namespace lockstep {

class KeptRun {
 public:
  // Throws Error (Cause::file) if a run in the folder would be overwritten. Keep all arguments alive.
  KeptRun(const TrainOptions& settings, const TrainCallbacks& callbacks, RunNotes& notes);

  RunNotes& notes() { return notes_; }

  // Makes the folder in the process that keeps the run. Call create() in every process before its ranks train.
  void create(const Workload& workload);

  // Call these on rank 0 of the run: first epoch(), which writes the last epoch of `history`, then checkpoint(), then
  // tell().
  void epoch(const std::vector<EpochMetrics>& history, const torch::nn::Module& net);
  void checkpoint(const RunState& state) { folder_->keep(state); }
  void tell(const EpochMetrics& metrics);
  bool has_kept(int epochs) const { return kept_epochs_ >= epochs; }

  // Makes this process keep the run from here on. `met` says that it has trained with others (take_over.hpp).
  void take_over(bool met);

  void finish(const std::vector<EpochMetrics>& history) { folder_->finish(history); }

 private:
  void write_events(const EpochMetrics& metrics);

  const TrainOptions& settings_;
  const TrainCallbacks& callbacks_;
  RunNotes& notes_;
  bool is_keeper_;
  std::optional<RunFolder> folder_;     // the run's folder; one without a path keeps nothing
  std::optional<io::TfEvents> events_;  // TensorBoard's file, which begins with the first epoch written here
  Judge judge_;
  int64_t samples_ = 0;  // samples of an epoch
  int kept_epochs_ = 0;  // epochs whose files and checkpoint this process has written
  int told_epochs_ = 0;  // epochs that the caller knows
};

}  // namespace lockstep
