// RecordedDraws: while one lives, layers of this thread that draw by the step take the step's number from a tensor on
// the device. So a CUDA graph that records them draws anew in each replay, what the same steps draw without a graph.
#pragma once

#include <ATen/core/Tensor.h>

namespace lockstep {

class RecordedDraws {
 public:
  // `step` is int64 []. Set it to SampleScope::Place::step before each replay.
  explicit RecordedDraws(const at::Tensor& step);
  ~RecordedDraws();
  RecordedDraws& operator=(RecordedDraws&&) = delete;

  // Gives the innermost object's tensor, and notes that somebody draws; an undefined one if there is no object.
  static at::Tensor step();

  bool any() const { return any_; }  // tells whether somebody drew

 private:
  const at::Tensor step_;
  RecordedDraws* const before_;
  bool any_ = false;
};

}  // namespace lockstep
