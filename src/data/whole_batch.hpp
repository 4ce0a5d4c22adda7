// WholeBatch: a batch that in_parts() has cut, and what is counted there for the parts' losses.
//
// All parts of one batch share it. Use it from the rank's thread only.
#pragma once

#include <ATen/core/Tensor.h>
#include <lockstep/data/data.hpp>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace lockstep {

struct WholeBatch {
  const Batch batch;
  std::vector<at::Tensor> samples_per_count = {};  // Batch::samples_per_count of each loss of a part
  int64_t part = 0;                                // the number of the last part
  size_t next = 0;                                 // the number of that part's next loss
};

}  // namespace lockstep
