// SamplePlaces: where the samples stand that a replica computes: in which step, and in which batch of it, where several
// whole ones add up. For layers that draw by the places of their samples. Used by one thread.
#pragma once

#include <lockstep/data/data.hpp>
#include <lockstep/models/sample_scope.hpp>

#include <cstdint>

namespace lockstep {

class SamplePlaces {
 public:
  // Of replica `index` of `count`, in a run with this seed.
  SamplePlaces(uint64_t seed, int index, int count) : seed_(seed), index_(index), count_(count) {}

  // Of this replica's part of a batch that it computes next, whose place is as batches() cuts it, if it does not say.
  SamplePlace of(const Batch& batch);

  void computed() { computed_ = true; }  // a backward to whose gradients the step's others add theirs
  int64_t steps_done() const { return steps_done_; }
  void set_steps_done(int64_t steps);

 private:
  bool begins_another(const Batch& batch) const;

  const uint64_t seed_;
  const int index_, count_;
  int64_t steps_done_ = 0;
  // In the present step:
  int64_t batches_ = 0;  // whole ones before the last part
  bool any_ = false;     // there was a part
  int32_t mark_ = 0;     // the last part's
  int64_t end_ = 0;      // the place behind its samples
  bool computed_ = false;
};

}  // namespace lockstep
