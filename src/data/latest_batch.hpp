// Tells batches apart by their marks, and notes the batch that a thread took last. DataParallel::mean() cannot see in
// its arguments whether the batch had a grain. The note of batches() lets it refuse a backward without grains of a
// batch with a grain. Each thread has its own note. Cost: a weak pointer.
#pragma once

#include <lockstep/data/data.hpp>

#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

namespace lockstep {

// Gives Batch::mark, which tells whole batches apart. It is even if the order was shuffled, else odd. Make `mixed` from
// everything that decides on the whole batch's samples.
inline int32_t mark_from(uint64_t mixed, bool shuffled) {
  const auto half = static_cast<uint64_t>(std::numeric_limits<int32_t>::max() / 2);
  return 2 * static_cast<int32_t>(mixed % half) + (shuffled ? 2 : 1);
}

// Tells whether the batch's order was shuffled; false if the mark is not known.
inline bool is_of_shuffled(int32_t mark) {
  return mark != 0 && mark % 2 == 0;
}

struct BatchSizes {
  int64_t local = 0, global = 0, grain = 0;  // numbers of samples
  int partners = 0;                          // the number of partners into which the batch was cut
  int32_t mark = 0;                          // Batch::mark
};

// Notes the batch. `versions` counts how often each tensor of the data has been written to by now.
void note_batch(const Batch& batch, int partners, std::vector<uint32_t> versions);

// Gives the sizes of the batch that this thread took last, while somebody still has its samples.
std::optional<BatchSizes> latest_batch();

// Gives the versions that were noted with this batch, or none if the thread took another batch last.
std::vector<uint32_t> versions_of_batch(const Batch& batch);

}  // namespace lockstep
