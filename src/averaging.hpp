// Averaging: what makes a replica's gradients averages over the ranks when its backward() returns. The Reducer is one,
// and a ShardedOptimizer brings another.
#pragma once

#include <torch/nn/module.h>
#include <lockstep/data_parallel.hpp>
#include <lockstep/rank.hpp>

#include <functional>
#include <memory>
#include <string>

namespace lockstep {

class Averaging {
 public:
  virtual ~Averaging() = default;

  // Runs `backward`, which adds to the parameters' gradients, and returns when all are averages over the ranks: also
  // those that it did not touch. All ranks must call it. If it throws, every later call throws an Error that says so,
  // because this rank may owe the others its share.
  virtual void average_during(const std::function<void()>& backward) = 0;

  // Whether a gradient that is computed from now on is the last of its parameter in this backward, so that it may be
  // averaged. So it is at first.
  virtual void listen(bool last) = 0;

  // Whether average_during may wait for other ranks before `backward` is done.
  virtual bool waits_in_backward() const { return false; }
};

// The replica averages by `averaging` from here on, in place of what it had.
void set_averaging(Replica& replica, std::shared_ptr<Averaging> averaging);
Rank& rank_of(Replica& replica);
torch::nn::Module& module_of(Replica& replica);

// What the calls after a failed backward say; called while its exception is handled.
std::string out_of_step(const Rank& rank, const std::string& user);

}  // namespace lockstep
