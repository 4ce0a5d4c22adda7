// Update applies the gradients of a step as a run's options say. It has the optimizer, with the learning rate of that
// moment, the rounds of local SGD, and a Task's average of the weights.
//
// Use it from one thread.
#pragma once

#include <torch/optim/optimizer.h>
#include <lockstep/lab/local_sgd.hpp>
#include <lockstep/lab/weight_average.hpp>
#include <lockstep/optim/learning_rate.hpp>
#include <lockstep/split/split_model.hpp>
#include <lockstep/trainer/task.hpp>
#include <lockstep/trainer/trainer.hpp>

#include "data_parallel/net_optimizer.hpp"
#include "optim/fused_optimizers.hpp"
#include "run_state.hpp"

#include <memory>
#include <optional>
#include <vector>

namespace lockstep {

// More than twelve functions: a step, the learning rate, the average, and the state of each for files and checks.
class Update {
 public:
  // Updates the parameters of `net`. `module` is the argument of Task::groups; null: the rank's layers. Throws Error if
  // the Task's functions make no groups or no optimizer of them.
  Update(const TrainOptions& options, const SplitModel& net, const Task& task, const torch::nn::Module* module);

  // Makes gradients undefined, as LibTorch's zero_grad() does. So a parameter that a step does not use is left alone,
  // whether the run has gone on from a checkpoint or not. Gradients stay in place, as zeros, with a CUDA graph, which
  // needs their memory, and with local SGD, where every rank needs a state of each parameter. They also stay in
  // networks that are split by layers or channels, which use every parameter in each step. Give `anew` within a
  // recording whose gradients no bucket holds: then backward writes them, and adds to nothing.
  void zero_grad(bool anew = false);

  // Sets the learning rate for the moment when `epochs_done` epochs are done, and returns it.
  double set_time(double epochs_done);

  // Does the half of a step that needs the other ranks' gradients. Call it on all ranks, or step() begins with it.
  void prepare();
  void step();

  // Tells whether step() can be recorded. Then, for each step that a graph does, call before_replay() and
  // after_replay(): the first counts the step, and writes the learning rate.
  bool can_be_recorded() const {
    return fused() != nullptr && fused()->can_be_recorded() && (!average_ || average_->is_begun());
  }
  void before_replay() { fused()->before_replay(); }
  void after_replay() { fused()->after_replay(); }

  // Lets step() leave everything as it was where `found`, float [1] on the GPU, is 1; undefined: it never does. An
  // optimizer that is not fused (fused_optimizers.hpp) does not look there: can_skip() tells. If the run goes on, say
  // so, and call forget_step() for each such step of a graph when the host knows of it.
  void skip_where(const at::Tensor& found, bool goes_on) {
    if (fused() != nullptr) fused()->skip_where(found, goes_on);
  }
  bool can_skip() const { return fused() != nullptr && !average_; }
  void forget_step() { fused()->forget_step(); }

  // Gives the averaged gradients that step() uses; with zero_stage the rank's slices of them.
  std::vector<at::Tensor> gradients() const { return optimizer_.gradients(); }

  // Gives the state that is the same on all ranks along the data axis (replica_check.hpp): weights that are not
  // divided, their average, and the state of an optimizer that no rank has alone.
  io::NamedTensors replica() const;

  // These are about weights and optimizer state that this rank alone has, or may have: its slices, layers without
  // replicas, and with local SGD everything. Buffers do not count, since a forward may change them.
  bool has_some_alone() const { return optimizer_.sharded() || local_ || is_only_replica_; }
  std::vector<WatchedTensor> alone() const;

  // Ends a round of local SGD early; within one the ranks' parameters differ.
  void synchronize() {
    if (local_) local_->synchronize();
  }

  // Gives this rank's layers of the net. The ranks along the data axis have replicas of them.
  const std::shared_ptr<Replica>& part() const { return optimizer_.replica(); }

  // Gives the average; none if the weights are evaluated.
  std::optional<WeightAverage>& average() { return average_; }

  // Gives the optimizer, for Task::before_step.
  NetOptimizer& optimizer() { return optimizer_; }

  // save() puts the optimizer's state into a checkpoint, and load() takes it back; plain SGD has none. Call both on all
  // ranks, each with its Rank of the whole run. Throws Error if the state is of another network, or of other ranks than
  // it can go on with.
  void save(RunState& state, Rank& rank);
  void load(const RunState& state, const Rank& rank);

 private:
  // Gives null for another optimizer.
  Fused* fused() const { return dynamic_cast<Fused*>(&optimizer_.inner()); }
  bool divides_parameters() const { return optimizer_.sharded() && optimizer_.sharded()->divides_parameters(); }
  void load_of_ranks(const RunState& state, const Rank& rank);
  io::NamedTensors parameters() const;  // gives this rank's parameters

  SplitModel net_;
  const double clip_;
  const bool in_place_;         // gradients stay in place and become zero
  const bool is_only_replica_;  // no other rank has these layers
  const LearningRate rate_;
  NetOptimizer optimizer_;
  bool prepared_ = false;
  std::optional<LocalSgd> local_;
  std::optional<WeightAverage> average_;
};

}  // namespace lockstep
