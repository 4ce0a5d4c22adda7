// Reducer: averages a replica's gradients over the ranks, bucket by bucket, while backward still computes others.
//
// A bucket is flat memory that holds the gradients of several parameters of one type; each parameter's .grad
// is a view into it. The average is one allreduce on the rank's backend, or what a CommunicationHook makes of it. With
// a hook a bucket may take several rounds, whose order is as fixed as the buckets': see move_on(). A single rank's
// gradients stay where backward left them: buckets get memory for a hook and for grains alone.
#pragma once

#include <c10/core/Stream.h>
#include <lockstep/data_parallel/communication_hook.hpp>
#include <lockstep/data_parallel/options.hpp>

#include "gradient_buckets.hpp"
#include "ranks/trained_parameters.hpp"

#include <optional>
#include <vector>

namespace lockstep {

class Reducer : public GradientBuckets {
 public:
  // Leaves out the module's parameters that need no gradient, until they need one. Keep the module alive. Throws Error:
  // an option below 1, a hook that another DataParallel has.
  Reducer(const torch::nn::Module& module, const Rank& rank, const DataParallelOptions& options);
  ~Reducer() override;

 private:
  struct Exchange {  // one bucket's exchange
    GradientBucket gradients;
    at::Tensor memory = {};               // the gradients' memory, in equal slices of the ranks
    CommunicationHook::Round round = {};  // the round that was begun last
    at::Tensor average = {};              // by grains, a tensor of the memory's size, or the memory itself
  };

  void begin(bool by_grains) override;
  void collect(size_t slot) override;  // makes .grad the slot's view, if there is one, without changing a value
  bool take_product(size_t slot, const GradientFactors& factors) override;
  void post(size_t bucket) override;  // begins the bucket's first round
  // In turn t bucket t's first round begins, then the next round of each earlier bucket that has one.
  void move_on(bool may_wait) override;
  void complete(bool partial) override;
  void abandon() override;
  // If Gloo or NCCL add, the order of additions depends on a gradient's place in its bucket.
  void follow(const std::vector<size_t>& order) override;

  void take_parameters();  // makes slots and buckets of those that need a gradient
  void take_turns(bool may_wait);
  void poll();
  void leave_gradients();       // by grains: makes .grad the average, or adds it to what was there
  void let_go_of(size_t slot);  // moves a gradient that somebody keeps beyond the step out of its bucket
  bool in_rounds() const { return options_.hook || by_grains(); }
  bool is_complete(const Exchange& exchange) const;  // tells whether its present round is complete
  void go_on(Exchange& exchange);                    // begins its next round; call it when the one before is complete
  void end_of(size_t bucket);                        // ends a bucket after its last round
  void make_buckets(const std::vector<size_t>& order, size_t used);  // keeps the first `used` slots apart from the rest
  void give_memory(size_t bucket);

  const DataParallelOptions options_;
  const torch::nn::Module& module_;
  TrainedParameters parameters_;
  std::optional<c10::Stream> poll_stream_;  // see is_complete(); all of a hook's work is on it
  std::vector<Exchange> exchanges_;         // the buckets' exchanges, in the buckets' order
  std::vector<size_t> open_;                // posted buckets that were not complete when last polled
  size_t turn_ = 0;                         // the number of earlier buckets, whose next rounds are part of this turn
  size_t place_ = 0;                        // the first earlier bucket that this turn has not come to
};

}  // namespace lockstep
