#include "sample_places.hpp"

#include "data/parts.hpp"

namespace lockstep {

SampleScope::Place SamplePlaces::of(const Batch& batch) {
  if (begins_another(batch)) ++batches_;
  SampleScope::Place place{
      .seed = seed_, .step = steps_done_, .batch = batches_, .first = batch.first, .size = batch.size()};
  if (place.first < 0) {
    const Range part = part_of(batch.global_size, index_, count_);
    if (part.size() == batch.size()) place.first = part.begin;
  }
  any_ = true;
  mark_ = batch.mark;
  end_ = place.first + place.size;
  computed_ = false;
  return place;
}

// Another batch begins only after a backward: forwards alone, as for a validation, do not count. Parts of one batch
// have its mark, or follow each other. A part without a known beginning is all that the replica gets.
bool SamplePlaces::begins_another(const Batch& batch) const {
  if (!any_ || !computed_) return false;
  if (batch.mark != 0 && mark_ != 0) return batch.mark != mark_;
  return batch.first < 0 || batch.first < end_;
}

void SamplePlaces::set_steps_done(int64_t steps) {
  steps_done_ = steps;
  batches_ = 0;
  any_ = computed_ = false;
}

}  // namespace lockstep
