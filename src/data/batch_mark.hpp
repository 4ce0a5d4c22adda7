// Batch::mark tells whole batches apart. It also tells whether their order was shuffled: then it is even, else odd.
#pragma once

#include <cstdint>
#include <limits>

namespace lockstep {

// Make `mixed` from everything that decides which samples the whole batch has.
inline int32_t mark_from(uint64_t mixed, bool shuffled) {
  const auto half = static_cast<uint64_t>(std::numeric_limits<int32_t>::max() / 2);
  return 2 * static_cast<int32_t>(mixed % half) + (shuffled ? 2 : 1);
}

// Whether the batch's order was shuffled; false if the mark is not known.
inline bool is_of_shuffled(int32_t mark) {
  return mark != 0 && mark % 2 == 0;
}

}  // namespace lockstep
