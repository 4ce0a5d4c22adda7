// ElasticRun lets train() go on when processes are gone or come. It keeps the state that this process goes on from, and
// gives rank 0's process the run's folder. run() calls it between two generations, and the ranks here within one.
#pragma once

#include <lockstep/ranks/rank.hpp>
#include <lockstep/trainer/trainer.hpp>

#include "kept_run.hpp"
#include "ranks/succession.hpp"
#include "run_state.hpp"
#include "survive/elastic_job.hpp"

#include <memory>
#include <optional>
#include <stop_token>
#include <utility>

namespace lockstep {

class ElasticRun : public Succession {
 public:
  // Gives null if the launcher asks for no elastic job. The launcher knows from here on that this process takes part.
  // Throws Error if the options cannot be elastic, or if this process has had such a run before. Keep `kept` alive.
  static std::shared_ptr<ElasticRun> of(const TrainOptions& settings, const TrainCallbacks& callbacks, KeptRun& kept);

  ElasticRun(const TrainOptions& settings, const TrainCallbacks& callbacks, KeptRun& kept);

  // Takes the checkpoint that the run goes on from, if any. Call it before the first generation.
  void resume(std::optional<RunState> state) { state_ = std::move(state); }

  bool enter() override;
  void leave() override { job_.leave(); }
  bool goes_on() override;
  bool is_done() const { return is_done_; }  // the last generation has come to the run's end

  // Call these on all ranks. begin() gives the state of the most advanced rank, or none if the run begins.
  std::optional<RunState> begin(Rank& rank);
  std::stop_token newer() const { return job_.newer(); }
  bool is_successor() const { return job_.generation() > 0; }  // there was a generation before this one
  bool may_mend() const { return mended_ < kMostMended; }

  // Call these on the process's first rank, at its end. end() says that the run is done. leave_behind() takes the state
  // that the next generation goes on from. Call drop() in a process whose replica is wrong: it then gets the others'
  // state.
  void end() { is_done_ = true; }
  void leave_behind(RunState state) { left_ = std::move(state); }
  void drop() { left_ = state_ = std::nullopt; }
  void mend() {  // begins another generation, with equal replicas
    ++mended_;
    differs_ = true;
  }

 private:
  static constexpr int kMostMended = 10;  // most mended replicas; memory that fails so often is no chance

  ElasticJob job_;
  KeptRun& kept_;
  std::optional<RunState> state_;  // the state that the generation begins with here
  std::optional<RunState> left_;   // the state that the generation has left
  bool met_ = false;               // this process has trained with others, so a run of this job is in the folder
  bool is_done_ = false;
  bool differs_ = false;  // the generation ended since replicas were not equal
  int mended_ = 0;        // number of generations that ended so
};

}  // namespace lockstep
