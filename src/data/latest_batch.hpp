// Notes which batch a thread took last. DataParallel::mean() cannot see in its arguments whether the batch had a grain.
// By the note of batches(), a backward without grains of a batch with a grain can be refused. Each thread has its own
// note. Cost: a weak pointer.
#pragma once

#include <lockstep/data/data.hpp>

#include <cstdint>
#include <optional>
#include <vector>

namespace lockstep {

struct BatchSizes {
  int64_t local = 0, global = 0, grain = 0;  // numbers of samples
  int partners = 0;                          // the number of partners into which the batch was cut
  int32_t mark = 0;                          // Batch::mark
};

// Notes the batch. `versions` counts how often each tensor of the data has been written to by now.
void note_batch(const Batch& batch, int partners, std::vector<uint32_t> versions);

// The sizes of the batch that this thread took last, while somebody still has its samples.
std::optional<BatchSizes> latest_batch();

// The versions that were noted with this batch; empty if the thread took another batch last.
std::vector<uint32_t> versions_of_batch(const Batch& batch);

}  // namespace lockstep
