// Averaging: what makes a replica's gradients averages over the ranks when its backward() returns. The Reducer is one,
// and a ShardedOptimizer brings another.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace lockstep {

// This rank's part of the batch that a backward is of; zeros where that is not known.
struct PartSizes {
  int64_t local = 0;
  int64_t accumulated = 0;  // with the parts of the backwards under no_sync() before it
  int64_t global = 0;
  int32_t mark = 0;  // Batch::mark
};

class Averaging {
 public:
  // Errors begin with `name`: whose rank's it is, and what the user calls it.
  explicit Averaging(std::string name) : name_(std::move(name)) {}
  virtual ~Averaging() = default;

  // Runs `backward`, which adds to the parameters' gradients, and returns when all are averages over the ranks: also
  // those that it did not touch. One that no rank has a gradient of stays without. All ranks must call it. If it
  // throws, every later call throws an Error that says so, because this rank may owe the others its share. Throws Error
  // on all ranks: parts that do not make up the batch.
  void average_during(const std::function<void()>& backward, const PartSizes& sizes);

  // Every later average_during throws an Error that says `reason`.
  void end(const std::string& reason) { failure_ = reason; }

  // Throws Error if parameters were changed by gradients that were never averaged.
  virtual void check_that_steps_were_averaged() {}

  // Whether a gradient that is computed from now on is the last of its parameter in this backward, so that it may be
  // averaged. So it is at first.
  virtual void listen(bool last) = 0;

  // Whether average_during may wait for other ranks before `backward` is done.
  virtual bool waits_in_backward() const { return false; }

  // Whether a rank has slices of the averaged gradients, and not all of them, and which: pieces of the parameters'
  // gradients, by name, in the memory that an update uses. Throws Error if nothing was averaged.
  virtual bool in_slices() const { return false; }
  virtual std::vector<std::pair<std::string, at::Tensor>> slices() { return {}; }

  // What was learnt of the order of the gradients, as far as the averages' bits depend on it: how many parameters there
  // are, and then their numbers. Empty before that. Whoever goes on from it takes no other steps than who learnt it.
  // Equal on all ranks; numbers below 0 count as none, and an order that is not one of these parameters is not taken:
  // it is learnt anew.
  virtual std::vector<int64_t> order() const { return {}; }
  virtual void set_order(const std::vector<int64_t>& /*order*/) {}

 protected:
  const std::string& name() const { return name_; }
  const std::string& backward_name() const { return backward_name_; }  // of the one under way, equal on all ranks

 private:
  virtual void average(const std::function<void()>& backward, const PartSizes& sizes) = 0;  // what average_during does
  virtual void abandon() = 0;  // all that is under way, when average() has thrown

  const std::string name_;
  int64_t backwards_ = 0;
  std::string backward_name_;
  std::string failure_;  // of an earlier backward; empty while all is well
};

}  // namespace lockstep
