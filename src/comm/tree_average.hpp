// A TreeAverage adds rows of several ranks in a given order. A TreeBackend makes the average in one call.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <cstddef>
#include <vector>

namespace lockstep::comm {

struct Addition {
  size_t into = 0, from = 0;  // row number `into` becomes the sum of both
};

// Make it equal on all ranks. The additions number the rows of all ranks, one rank's after the other's, and leave
// their sum in the first row.
struct TreeAverage {
  std::vector<Addition> additions = {};
  double divisor = 1;
};

// Backends whose ranks read each other's memory have this call in addition to c10d's.
class TreeBackend {
 public:
  virtual ~TreeBackend() = default;

  // Gives null if the backend has no such call.
  static TreeBackend* of(c10d::Backend& backend) {
    auto* const tree = dynamic_cast<TreeBackend*>(&backend);
    return tree != nullptr && tree->averages_in_tree() ? tree : nullptr;
  }

  // Begins the average. Hold AgreedParts that name all that the order depends on. A rank's rows have one dimension, and
  // one size on all ranks; a rank may have none. `target` becomes the average, or if `in_slices` the rank's slice of
  // it. An average has no -0. The first row may be the target. The rows' values are lost.
  virtual c10::intrusive_ptr<c10d::Work> average_in_tree(const std::vector<at::Tensor>& rows,
                                                         const TreeAverage& average, at::Tensor target,
                                                         bool in_slices) = 0;

 private:
  virtual bool averages_in_tree() const { return true; }  // false means that it wraps a backend that does not
};

}  // namespace lockstep::comm
