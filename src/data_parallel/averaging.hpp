// Averaging: averages a replica's gradients over the ranks during its backward(). The Reducer is one; a net that is
// sharded has another.
#pragma once

#include <ATen/core/Tensor.h>

#include "loop_warnings.hpp"

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace lockstep {

struct GradientFactors;

// The sizes of a backward's batch and of this rank's part of it. Zeros: not known.
struct PartSizes {
  int64_t local = 0;
  int64_t accumulated = 0;  // local, and the parts of the backwards under no_sync() before it
  int64_t global = 0;
  int32_t mark = 0;  // Batch::mark
  bool by_grains = false;
  bool partial = false;  // see PartOfStep; the sizes are not of whole batches
};

// Which grains of a batch which rank has: rank r those from runs[r] up to runs[r + 1].
struct GrainPlan {
  std::vector<int64_t> runs = {};
  int64_t samples = 0;  // of the whole batch
  int32_t mark = 0;     // Batch::mark
  friend bool operator==(const GrainPlan&, const GrainPlan&) = default;
};

// Is told of each gradient of a grain before it is added up, on the thread that computes it.
using GrainObserver = std::function<void(int64_t grain, const at::Tensor& parameter, const at::Tensor& gradient)>;

class Averaging {
 public:
  // Errors begin with `name`. It says which rank this is, and what the user calls the object.
  explicit Averaging(std::string name) : name_(std::move(name)) {}
  virtual ~Averaging() = default;

  // Runs `backward`, which adds to the parameters' gradients. Returns when all gradients are averages over the ranks,
  // also those that `backward` did not touch. If no rank has a gradient of a parameter, the parameter gets none. All
  // ranks must call it. If it throws, every later call throws an Error that says so, because this rank may owe the
  // others its share. Throws Error on all ranks if the parts do not make up the batch.
  void average_during(const std::function<void()>& backward, const PartSizes& sizes);

  LoopWarnings& loop_warnings() { return loop_warnings_; }

  // Somebody else compares the ranks' networks, and says more of a difference than a backward could.
  void leave_comparing() { compares_ = false; }

  // Every later average_during throws an Error that says `reason`.
  void end(const std::string& reason) { failure_ = reason; }

  // By grains: from begin_grains() until the next averaged backward is done, each gradient is of the grain between
  // open_grain() and close_grain(), and of the sum of its samples' losses. The average is then the grains' sum in one
  // order, divided by the batch's samples. The rank's grains come in ascending order, each once. Where backward
  // exchanges parameters, `stand_ins` follow in the same backward, of number kStandIn: their gradients are dropped.
  // Throws Error: a way to average that depends on the ranks; another plan than that of the grains before; a grain out
  // of order.
  static constexpr int64_t kStandIn = -1;
  virtual void begin_grains(const GrainPlan& plan) = 0;
  virtual void open_grain(int64_t number, int64_t stand_ins = 0) = 0;
  virtual void close_grain() = 0;
  // In an open grain: whether it takes the factors of a parameter's gradient, which backward then does not compute.
  virtual bool take_factors(const at::Tensor& /*parameter*/, const GradientFactors& /*factors*/) { return false; }
  void observe_grains(GrainObserver observer) { grain_observer_ = std::move(observer); }

  // Throws Error if parameters were changed by gradients that were never averaged.
  virtual void check_that_steps_were_averaged() {}

  // Says whether a gradient computed from now on is its parameter's last in this backward, so that it may be averaged.
  // True at first.
  virtual void listen(bool last) = 0;

  // Whether the average of a part of a step may be added to those before, so that no rank keeps gradients whole.
  virtual bool adds_up_parts() const { return false; }

  // Whether average_during may wait for other ranks before `backward` is done.
  virtual bool waits_in_backward() const { return false; }

  // Whether forward and backward exchange parameters with the other ranks, so that a rank without samples computes too.
  // What fails in such an exchange is LibTorch's exception at first; rethrow_failure() then throws the failure itself.
  virtual bool exchanges_in_forward() const { return false; }
  virtual void rethrow_failure() const {}

  // The learnt order of the gradients, as far as the averages' bits depend on it: the number of parameters, then the
  // parameters' numbers. Empty while nothing was learnt. Equal on all ranks. A run that goes on with it takes the same
  // steps as the run that learnt it. set_order ignores numbers below 0. If an order does not fit the parameters, it is
  // learnt anew.
  virtual std::vector<int64_t> order() const { return {}; }
  virtual void set_order(const std::vector<int64_t>& /*order*/) {}

 protected:
  const std::string& name() const { return name_; }
  bool compares() const { return compares_; }
  const std::string& backward_name() const { return backward_name_; }      // of the one under way, equal on all ranks
  const GrainObserver& grain_observer() const { return grain_observer_; }  // empty: nobody asked

 private:
  virtual void average(const std::function<void()>& backward, const PartSizes& sizes) = 0;  // for average_during
  virtual void abandon() = 0;  // drops all that is under way, when average() has thrown

  const std::string name_;
  int64_t backwards_ = 0;
  std::string backward_name_;
  GrainObserver grain_observer_;
  LoopWarnings loop_warnings_;
  bool compares_ = true;
  std::string failure_;  // of an earlier backward; empty while all is well
};

}  // namespace lockstep
