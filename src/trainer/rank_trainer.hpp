// RankTrainer does the work of one rank of a run from the first epoch to the last.
//
// Use it from the rank's thread only, and on all ranks alike. On a GPU everything is queued on a stream of the rank's
// own. No step waits for the GPU, unless somebody wants to see the loss.
#pragma once

#include <lockstep/data_parallel/communication_hook.hpp>
#include <lockstep/lab/balance.hpp>
#include <lockstep/split/split_model.hpp>
#include <lockstep/trainer/task.hpp>
#include <lockstep/trainer/trainer.hpp>

#include "epoch_clock.hpp"
#include "finite_watch.hpp"
#include "ranks/stop_agreement.hpp"
#include "replica_watch.hpp"
#include "run_notes.hpp"
#include "run_state.hpp"
#include "step.hpp"
#include "step_traffic.hpp"
#include "straggler.hpp"
#include "totals.hpp"
#include "trace.hpp"
#include "update.hpp"
#include "wait_clock.hpp"

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace lockstep {

class RankTrainer {
 public:
  // `trace`, if any, is told of each step. With `graph` steps are recorded in it and replayed. With `resumed` it goes
  // on from there, and the first epoch is the next one. `balance` is for options.batch.balance "auto". Throws Error if
  // `resumed` is of another network, or if the graph would hold an exchange whose order nobody can learn.
  RankTrainer(const TrainOptions& options, const TrainCallbacks& callbacks, const Task& task, Rank& rank, Trace* trace,
              std::unique_ptr<Graph> graph, const RunState* resumed = nullptr, const BalanceOptions& balance = {});

  // Throws ReplicasDiffer on all ranks if options.check_replicas finds a difference; whole_steps() then gives the state
  // before it. Calls `keep`, if any, on all ranks after every Checkpoints::every steps but the last one. When one rank
  // was asked to stop, all agree on a step, call `keep` after it, and throw Stopped. Without `keep` an evaluation is
  // stopped too.
  using Keep = std::function<void()>;
  EpochMetrics epoch(int number, const Keep& keep = {});

  // Says why the run cannot go on; "" if all is well. With options.on_nan "stop" it names the step and the rank whose
  // loss or gradients are not finite. With "skip" it says that no step was taken. The text is the same on all ranks.
  // The epoch has then ended there, without an evaluation.
  const std::string& not_finite() const { return watch_.complaint(); }

  // Call be_elastic() in an elastic job, before the first epoch. All ranks end the epoch between two steps once one of
  // them finds `newer` requested; then regroups() is true on all. whole_steps() gives the state after this rank's last
  // whole step. whole_steps() needs no other rank, so call it also when the run has failed.
  void be_elastic(const std::stop_token& newer);
  bool regroups() const { return regroups_; }
  RunState whole_steps();

  // Gives what the ranks have of a checkpoint: position, seconds and tensors. Call it on all ranks. The tensors may be
  // the network's own, so use them before the next step. From then on whole() has the trained weights.
  RunState state();

  // Makes whole() have the weights that are evaluated, with Task::ema_decay the average, as after an epoch. Call it on
  // all ranks.
  void show();

  // Names the rank or the pipeline's stage that the others waited for in the epochs so far (straggler.hpp). Gives "" if
  // there is none, and where nobody sees waits: in recorded steps, and on GPUs with a Balance.
  std::string straggler();

  // Says what each rank has of the network and of a batch. Call it on all ranks.
  RankLayout layout();

  // Gives the whole network, under its own names. With a split by data alone it is this rank's own. Otherwise it is
  // another one: call whole() on all ranks then.
  std::shared_ptr<torch::nn::Module> whole();

 private:
  using Clock = std::chrono::steady_clock;

  void train(EpochMetrics& metrics, const Keep& keep);
  void begin_epoch();
  void go_on();
  bool within_round() const;
  void report(StepProgress& progress);
  void keep_or_stop(const Keep& keep);
  void call_before_step(EpochMetrics& metrics, int64_t steps);  // `steps` of a whole epoch
  void run_step(const Batch& batch);
  void search_algorithms_if(bool shapes_stay);
  void watch_waits_of_gpu();
  void add_times(const torch::Tensor& of_ranks, EpochMetrics& metrics);
  std::vector<std::string> names_of_ranks() const;
  int64_t samples_of_epoch() const;
  double sum_of_losses();  // gives the sum over the epoch's samples, of all ranks
  void end_epoch(EpochMetrics& metrics);
  void evaluate_now(EpochMetrics& metrics, bool to_the_end);
  bool holds_whole();  // tells whether the network is split by data alone
  void restore(const RunState& state);
  void save_average(RunState& state);
  void load_average(const RunState& state);
  void save_hook(RunState& state);
  void load_hook(const RunState& state);
  void save_order(RunState& state);
  void load_order(const torch::Tensor& table);
  void load_totals(const torch::Tensor& table);
  void load_buffers(const io::NamedTensors& tables);

  const TrainOptions& options_;
  const TrainCallbacks& callbacks_;
  const Task task_;
  const std::shared_ptr<WaitClock> wait_clock_;  // null: nobody sees the waits
  Rank rank_;                                    // wait_clock_ measures this rank's waits
  StepTraffic traffic_;
  const std::shared_ptr<CommunicationHook> hook_;
  Trace* const trace_;  // the trace; null: none is wanted
  const Samples train_;
  const Samples test_;
  MadeModule made_;  // `net_` has the layers, this has none
  SplitModel net_;
  Update update_;
  std::optional<Whole> all_parameters_;        // present while no step is computed
  std::optional<WeightAverage::Shown> shown_;  // present instead while the average stands in for the weights
  Totals totals_;
  FiniteWatch watch_;
  ReplicaWatch replicas_;
  const std::unique_ptr<TrainStep> step_;
  int64_t steps_ = 0;  // steps of an unfinished epoch
  EpochClock clock_;
  double began_at_ = 0;          // clock_'s seconds where these steps of the epoch began
  int64_t samples_before_ = 0;   // samples in totals_ at that moment
  RankTime own_time_;            // this rank's time in these steps
  double own_wait_ = 0;          // seconds in which this rank waited for others there; NaN: not measured
  std::vector<RankTime> times_;  // times of the ranks in the epochs so far
  int64_t timed_epochs_ = 0;
  std::optional<Balance> balance_;           // present if parts follow the devices' speed
  std::vector<double> shares_;               // shares at the last epoch's end, or the options'; empty: near-equal parts
  std::optional<StopAgreement> regrouping_;  // present in an elastic job
  bool regroups_ = false;
  int64_t whole_steps_ = 0;  // the epoch's whole steps, counted in an elastic job
  bool is_within_step_ = false;
  std::vector<torch::Tensor> buffers_;  // the module's buffers before this step
  StopAgreement stopping_;
  bool stops_ = false;  // all ranks have agreed to stop, once a round of local SGD is done
  Clock::time_point reported_;
};

}  // namespace lockstep
