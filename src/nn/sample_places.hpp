// SamplePlaces: knows the places of the samples that a replica computes: the step, and the batch in the step if several
// whole ones add up. Layers that draw need these places. Use it from one thread.
#pragma once

#include <lockstep/data/data.hpp>
#include <lockstep/nn/sample_scope.hpp>

#include <cstdint>

namespace lockstep {

class SamplePlaces {
 public:
  // Keeps the places of replica `index` of `count`, in a run with this seed.
  SamplePlaces(uint64_t seed, int index, int count) : seed_(seed), index_(index), count_(count) {}

  // Gives the place of the part that this replica computes next. If the batch does not say its place, this takes the
  // one that batches() would give.
  SampleScope::Place of(const Batch& batch);

  void computed() { computed_ = true; }  // call it after a backward to whose gradients the step's others are added
  int64_t steps_done() const { return steps_done_; }
  void set_steps_done(int64_t steps);

 private:
  bool begins_another(const Batch& batch) const;

  const uint64_t seed_;
  const int index_, count_;
  int64_t steps_done_ = 0;
  // These four fields are about the present step.
  int64_t batches_ = 0;  // the number of whole batches before the last part
  bool any_ = false;     // there was a part
  int32_t mark_ = 0;     // the mark of the last part
  int64_t end_ = 0;      // where the last part's samples end
  bool computed_ = false;
};

}  // namespace lockstep
