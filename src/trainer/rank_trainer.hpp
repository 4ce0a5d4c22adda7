// RankTrainer: what one rank of `lockstep train` does from the first epoch to the last.
//
// Used by its rank's thread only, and by all ranks alike. On a GPU everything is queued on a stream of the rank's own;
// no step waits for the GPU, unless somebody wants to see the loss.
#pragma once

#include <c10/core/StreamGuard.h>
#include <lockstep/data_parallel/balance.hpp>
#include <lockstep/data_parallel/data_parallel.hpp>
#include <lockstep/data_parallel/local_sgd.hpp>
#include <lockstep/data_parallel/power_sgd.hpp>
#include <lockstep/models/models.hpp>
#include <lockstep/ranks/evaluate.hpp>
#include <lockstep/ranks/traffic.hpp>
#include <lockstep/split/split_model.hpp>
#include <lockstep/trainer/trainer.hpp>

#include "graphed_step.hpp"
#include "ranks/stop_agreement.hpp"
#include "run_state.hpp"
#include "trace.hpp"
#include "update.hpp"

#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace lockstep {

// Ends a rank, and with it all others, because the user asked for it.
struct Stopped : std::exception {
  const char* what() const noexcept override { return "stopped by request"; }
};

// Sums over an epoch's samples that a rank has seen. The tensors stay on its device, so that nothing waits for it, and
// where they are, so that a graph finds them.
struct Totals {
  explicit Totals(const c10::Device& device);
  void reset();
  void add_loss(const torch::Tensor& mean, int64_t samples);
  void add_correct(const torch::Tensor& logits, const torch::Tensor& y);

  torch::Tensor loss;
  torch::Tensor correct;
};

class RankTrainer {
 public:
  // `trace`, if any, is told of each step; with `graph` steps are recorded in it and replayed. Goes on from `resumed`,
  // if any, whose next epoch is then the first. `balance` is for options.balance "auto". Throws Error if `resumed` is
  // of another network, or if the graph would hold an exchange whose order nobody can learn.
  RankTrainer(const TrainOptions& options, const TrainCallbacks& callbacks, const ImageData& data, Rank& rank,
              Trace* trace, std::unique_ptr<Graph> graph, const RunState* resumed = nullptr,
              const BalanceOptions& balance = {});

  // Calls `keep`, if any, on all ranks after every options.checkpoint_every steps but the last one, and after the step
  // at which all agree to stop because one was asked to; then throws Stopped. Without `keep` an evaluation is stopped
  // too.
  EpochMetrics epoch(int number, const std::function<void()>& keep = {});

  // Why the run cannot go on: with options.on_nan "stop", of which step the loss or the gradients are not finite, and
  // on which rank; with "skip", that no step was taken. The same on all ranks; empty if all is well. The epoch has then
  // ended there, without an evaluation.
  const std::string& not_finite() const { return not_finite_; }

  // What a checkpoint holds of the ranks: position, seconds and tensors. All ranks must ask for it.
  RunState state();

  // Seconds of the last epoch in which each rank had no minibatch yet.
  const std::vector<double>& waits() const { return waits_; }

  // The whole network, under its own names: what this rank holds, if it is split by data alone; else another one, which
  // all ranks must ask for.
  torch::nn::Sequential whole();

 private:
  using Clock = std::chrono::steady_clock;

  void check_that_order_can_be_learnt();
  void restore(const RunState& state);
  void put_communication(RunState& state);
  void put_order(RunState& state);
  void restore_order(const torch::Tensor& table);
  void restore_communication(const RunState& state);
  io::NamedTensors parameters() const;    // of this rank
  bool holds_whole();                     // it is split by data alone
  torch::nn::Sequential new_net() const;  // with the first weights
  void train(int number, EpochMetrics& metrics, const std::function<void()>& keep);
  std::vector<int64_t> parts_of_full_batch();
  void begin_epoch();
  bool is_time_to_compare() const;
  void step(const Batch& batch);
  // A step whose loss and gradients may not be finite.
  struct Watched {
    int64_t number = 0;  // in the epoch, from 1
    torch::Tensor sum;   // of its gradients, finite if they are, on all ranks
    torch::Tensor loss;  // of this rank's part
  };
  void step_or_skip(const Batch& batch);
  Watched watched_step();
  void watch();
  void settle();
  std::string what_is_not_finite(const Watched& step);
  void recorded_part(const Batch& batch);
  void part_after_recorded(const Batch& batch);
  void in_parts(const Batch& batch);
  void forward_backward(const Batch& batch);
  void update();
  void report(StepProgress& progress, Clock::time_point start) const;
  Score evaluate_now(bool to_the_end);

  const TrainOptions& options_;
  const TrainCallbacks& callbacks_;
  Rank rank_;
  const c10::OptionalStreamGuard stream_;   // before all that is made on it
  const std::shared_ptr<Traffic> traffic_;  // of steps; null: they are recorded
  Rank counted_;                            // rank_, whose calls are traffic_'s
  const std::shared_ptr<CommunicationHook> hook_;
  Trace* const trace_;  // null: none is wanted
  const Dataset train_;
  const Dataset test_;
  SplitModel net_;
  // Ranks that have the same samples add them to the epoch's sums once: the loss the first of them, what is right the
  // first of those that see the network's output.
  const bool counts_loss_;
  const bool counts_correct_;
  Update update_;
  std::optional<LocalSgd> local_;
  Totals totals_;
  int64_t steps_ = 0;          // of an epoch that is not finished
  double seconds_ = 0;         // that they took
  double waited_ = 0;          // and of these, for data
  std::vector<double> waits_;  // see waits()
  int64_t samples_ = 0;        // that totals_ are of
  int64_t left_out_ = 0;       // samples of the epoch, over all ranks, whose steps were skipped
  int64_t epoch_ = 0;
  torch::Tensor step_loss_;         // this rank's, of its parts together
  std::optional<Watched> watched_;  // what nobody has asked for yet
  std::string not_finite_;
  const bool ranks_differ_;       // in the gradients that they step with
  const bool exchange_recorded_;  // see recorded_part()
  std::optional<GraphedStep> graphed_;
  std::optional<Balance> balance_;  // parts follow the devices' speed
  std::vector<double> shares_;      // of the last epoch's end, or those of the options; empty: near-equal parts
  StopAgreement stopping_;
};

}  // namespace lockstep
