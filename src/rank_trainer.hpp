// RankTrainer: what one rank of `lockstep train` does from the first epoch to the last.
//
// Used by its rank's thread only, and by all ranks alike. On a GPU everything is queued on a stream of the rank's own;
// no step waits for the GPU, unless somebody wants to see the loss.
#pragma once

#include <c10/core/StreamGuard.h>
#include <lockstep/data_parallel.hpp>
#include <lockstep/evaluate.hpp>
#include <lockstep/models.hpp>
#include <lockstep/split_model.hpp>
#include <lockstep/trainer.hpp>

#include "graphed_step.hpp"
#include "trace.hpp"
#include "update.hpp"

#include <chrono>
#include <exception>
#include <memory>
#include <optional>

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
  // `trace`, if any, is told of each step; with `graph` steps are recorded in it and replayed.
  RankTrainer(const TrainOptions& options, const TrainCallbacks& callbacks, const ImageData& data, Rank& rank,
              Trace* trace, std::unique_ptr<Graph> graph);

  EpochMetrics epoch(int number);

  // The whole network, under its own names: what this rank holds, if it is split by data alone; else another one, which
  // all ranks must ask for.
  torch::nn::Sequential whole();

 private:
  using Clock = std::chrono::steady_clock;

  void train(int number, EpochMetrics& metrics);
  void step(const Batch& batch);
  void recorded_part(const Batch& batch);
  void part_after_recorded(const Batch& batch);
  void in_parts(const Batch& batch);
  Loss forward(const Batch& batch);
  void pipelined(const Batch& batch);
  void update();
  void report(StepProgress& progress, Clock::time_point start) const;
  void share_buffers();
  Score evaluate_now();

  const TrainOptions& options_;
  const TrainCallbacks& callbacks_;
  Rank& rank_;
  const c10::OptionalStreamGuard stream_;  // before all that is made on it
  Trace* const trace_;                     // null: none is wanted
  const Dataset train_;
  const Dataset test_;
  SplitModel net_;
  // Ranks that have the same samples add them to the epoch's sums once: the loss the first of them, what is right the
  // first of those that see the network's output.
  const bool counts_loss_;
  const bool counts_correct_;
  Update update_;
  Totals totals_;
  int64_t samples_ = 0;           // that totals_ are of
  const bool exchange_recorded_;  // see recorded_part()
  std::optional<GraphedStep> graphed_;
};

}  // namespace lockstep
