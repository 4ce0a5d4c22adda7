// Update: what a run's options make of the gradients of a step: the optimizer, with the learning rate of that moment,
// and with local SGD the rounds of the ranks' parameters; and the average of the weights, if a Task wants one.
//
// Used by one thread.
#pragma once

#include <torch/optim/optimizer.h>
#include <lockstep/lab/local_sgd.hpp>
#include <lockstep/optim/learning_rate.hpp>
#include <lockstep/split/split_model.hpp>
#include <lockstep/trainer/task.hpp>
#include <lockstep/trainer/trainer.hpp>

#include "data_parallel/net_optimizer.hpp"
#include "run_state.hpp"
#include "weight_average.hpp"

#include <memory>
#include <optional>
#include <vector>

namespace lockstep {

// More than twelve functions: a step, its learning rate, its average, and the state of each for files and checks.
class Update {
 public:
  // Updates the parameters of `net`. `module` is the argument of Task::groups; null: the rank's layers. Throws Error if
  // the Task's functions make no groups or no optimizer of them.
  Update(const TrainOptions& options, const SplitModel& net, const Task& task, const torch::nn::Module* module);

  // Gradients become undefined, as by LibTorch's zero_grad(). So a parameter that a step does not use is left alone,
  // whether the run has gone on from a checkpoint or not. They stay in place, as zeros, with a CUDA graph, which needs
  // their memory, and with local SGD, where every rank needs a state of each parameter. So they do in networks that are
  // split by layers or channels, which use every parameter in each step.
  void zero_grad();

  // Sets the learning rate for the moment when `epochs_done` epochs are done, and returns it.
  double set_time(double epochs_done);

  // Does the part of a step that needs the other ranks' gradients. Call it on all ranks; else step() begins with it.
  void prepare();
  void step();

  // The averaged gradients that it steps with; with zero_stage the rank's slices of them.
  std::vector<at::Tensor> gradients() const { return optimizer_.gradients(); }

  // State that is the same on all ranks along the data axis (replica_check.hpp): weights that are not divided, their
  // average, and the state of an optimizer that no rank has to itself.
  io::NamedTensors replica() const;

  // Weights and optimizer state that this rank alone has, or may have: its own slices, a part of the network without
  // replicas, and with local SGD all of it. Buffers do not count, since a forward may change them.
  bool has_some_alone() const { return optimizer_.sharded() || local_ || is_only_replica_; }
  std::vector<WatchedTensor> alone() const;

  // Ends a round of local SGD early; within one the ranks' parameters differ.
  void synchronize() {
    if (local_) local_->synchronize();
  }

  // While one lives, every rank has all parameters whole, and they are those that are evaluated: the average, if there
  // is one. Make it on all ranks, and not while a Whole lives.
  class Shown {
   public:
    explicit Shown(Update& update);
    ~Shown();
    Shown(const Shown&) = delete;
    Shown& operator=(const Shown&) = delete;

   private:
    Update& update_;
    std::optional<Whole> whole_;
  };
  // This rank's part of the net. The ranks along the data axis have replicas of it.
  const std::shared_ptr<Replica>& part() const { return optimizer_.replica(); }

  // Null: the weights are evaluated, or there has been no step.
  std::optional<WeightAverage>& average() { return average_; }

  // The optimizer's state, for a checkpoint, and back; plain SGD has none. `rank` is among all ranks: call it on all of
  // them. Throws Error if the state is of another network, or of other ranks than it can go on with.
  void save(RunState& state, Rank& rank);
  void load(const RunState& state, const Rank& rank);

 private:
  bool divides_parameters() const { return optimizer_.sharded() && optimizer_.sharded()->divides_parameters(); }
  void load_of_ranks(const RunState& state, const Rank& rank);
  io::NamedTensors parameters() const;  // this rank's parameters

  SplitModel net_;
  const double clip_;
  const bool in_place_;         // gradients become zero
  const bool is_only_replica_;  // no other rank has this part of the network
  const LearningRate rate_;
  NetOptimizer optimizer_;
  bool prepared_ = false;
  std::optional<LocalSgd> local_;
  std::optional<WeightAverage> average_;
};

}  // namespace lockstep
