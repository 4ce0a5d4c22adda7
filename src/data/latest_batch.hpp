// What DataParallel::mean() is given does not say whether the batch had a grain. So batches() notes here which batch a
// thread took last, and a backward without grains of a batch with a grain can be refused. Each thread has its own note.
// Cost: a weak pointer.
#pragma once

#include <lockstep/data/data.hpp>

#include <cstdint>
#include <optional>
#include <vector>

namespace lockstep {

struct BatchSizes {
  int64_t local = 0, global = 0, grain = 0;  // samples
  int shards = 0;                            // into which it was cut
};

// `versions` counts how often each tensor of the data was written to by now.
void note_batch(const Batch& batch, int shards, std::vector<uint32_t> versions);

// The sizes of the batch that this thread took last, while somebody still has its samples.
std::optional<BatchSizes> latest_batch();

// Those that were noted with this batch; empty if it is not the one that this thread took last.
std::vector<uint32_t> versions_of_batch(const Batch& batch);

}  // namespace lockstep
