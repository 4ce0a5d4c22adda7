// GrainTerms: adds up the gradients of a backward by grains: each gradient of a grain in its bucket's GrainSums.
//
// A gradient leaves .grad as soon as it is there, and without overlap at the grain's end. Between grains all .grad are
// undefined. A linear layer hands over factors, and .grad stays undefined. Use it under GradientBuckets' mutex.
#pragma once

#include <ATen/core/Tensor.h>
#include <lockstep/data_parallel/communication_hook.hpp>
#include <lockstep/ranks/rank.hpp>

#include "gradient_slots.hpp"
#include "grain_check.hpp"
#include "part_sizes.hpp"

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace lockstep {

// More than twelve functions: what begins, continues and ends at the step, at a grain, and at a bucket.
class GrainTerms {
 public:
  // Errors begin with `name`. `in_slices`: a rank gets only its slice of the averages. `check` is told of each gradient
  // before it is added up; then no layer hands over factors. Null: nobody is told.
  GrainTerms(const Rank& rank, std::string name, GradientSlots& gradients, bool in_slices,
             std::shared_ptr<GrainCheck> check)
      : rank_(rank), name_(std::move(name)), gradients_(gradients), in_slices_(in_slices), check_(std::move(check)) {}

  // From begin() to end() gradients are of grains. Throws Error: another plan than that of the grains before; a
  // gradient that a backward outside has left, if there was one.
  void begin(const GrainPlan& plan, bool backward_outside);
  bool active() const { return plan_.has_value(); }
  bool continues(const GrainPlan& plan) const;  // tells whether a step is active; throws Error if its plan is another
  void end();

  // Gradients between open() and close() are of this grain, and of the sum of its samples' losses. Open the rank's
  // grains in ascending order, each once. `stand_ins` follow in the same backward, of number kStandIn: their gradients
  // are dropped. Throws Error: a grain out of order.
  void open(int64_t number, int64_t stand_ins);
  bool is_open() const { return grain_.has_value(); }
  bool is_last() const { return last_; }                           // tells whether no grain or stand-in follows
  void take(size_t slot);                                          // takes the slot's gradient, or its factors
  bool take_factors(size_t slot, const GradientFactors& factors);  // false: nothing is taken
  void close();

  // Call these after the last grain. post() begins to average a bucket; `target` becomes the average, or this rank's
  // slice of it.
  void finish(size_t bucket) { gradients_.buckets[bucket].sums->finish(); }
  CommunicationHook::Round post(size_t bucket, const at::Tensor& target);
  void note_had();  // notes which slots had a gradient

 private:
  void refuse_gradients_from_outside() const;

  Rank rank_;
  const std::string name_;
  GradientSlots& gradients_;
  const bool in_slices_;
  const std::shared_ptr<GrainCheck> check_;
  std::optional<GrainPlan> plan_;
  Range run_;                     // this rank's grains
  std::optional<int64_t> grain_;  // the open grain's number, or kStandIn
  bool last_ = false;
};

// Averages the ranks' gradients over all grains of a batch, in the order of additions of grain_tree.hpp alone. Ranks of
// one process read each other's sums, in one call. Between processes all goes through the backend's alltoall, which all
// backends have, and in which nothing is added.
//
// Begins to average. `rows` are what GrainSums::rows() gave, and change. They have as many columns as there are ranks
// times a slice's. `target` becomes the average, or if `in_slices` this rank's slice of it. The first row may be the
// target. Call it on all ranks, and make the round's next calls in one order. The sum of the grains' gradients is
// divided by the batch's samples. Then +0 is added, so that parameters without a gradient get +0.
CommunicationHook::Round post_grain_average(Rank& rank, const std::vector<at::Tensor>& rows, const GrainPlan& plan,
                                            const at::Tensor& target, bool in_slices);

}  // namespace lockstep
