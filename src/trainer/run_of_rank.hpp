// RunOfRank does one rank's work from where the run begins or goes on to its end. It trains epochs, keeps each epoch's
// files, and in an elastic job leaves a state to the next generation. Use it from the rank's thread, on all ranks
// alike.
#pragma once

#include <lockstep/ranks/rank.hpp>
#include <lockstep/trainer/trainer.hpp>

#include "data_parallel/replica_check.hpp"
#include "elastic_run.hpp"
#include "kept_run.hpp"
#include "rank_trainer.hpp"
#include "run_state.hpp"
#include "trace.hpp"
#include "workload.hpp"

#include <optional>
#include <string>
#include <vector>

namespace lockstep {

// Has the things that the ranks of a process have in common.
struct SharedRun {
  const TrainOptions& settings;
  const TrainCallbacks& callbacks;
  const Workload& workload;
  const std::optional<RunState>& resumed;  // unused in an elastic job, where a state may come from another process
  KeptRun& kept;
  ElasticRun* const elastic;    // null: the job is not elastic
  Trace* const trace;           // null: there is none
  const std::string processor;  // RunState::processor
  // The process's first rank alone changes these two:
  TrainResult& result;
  std::string not_finite = {};  // why the run cannot go on; empty if all is well
};

class RunOfRank {
 public:
  RunOfRank(SharedRun& run, Rank& rank);

  void train();

 private:
  void keep_what_is_owed();
  void train_epochs();
  void end_epoch(EpochMetrics metrics);
  void keep_epoch(const EpochMetrics& metrics, const torch::nn::Module& net);
  void keep_state();
  void leave_state();
  void mend(const ReplicasDiffer& difference);
  RunState complete(RunState state) const;

  SharedRun& run_;
  const TrainOptions& settings_;
  const Task& task_;
  Rank& rank_;
  const bool is_first_here_;  // this rank is its process's first
  const bool may_mend_;
  const Judge judge_;
  const std::optional<RunState> begin_;
  std::vector<EpochMetrics> history_;  // this rank's own copy
  RankTrainer trainer_;
  const RankTrainer::Keep keep_;  // empty: no checkpoints are kept
};

}  // namespace lockstep
