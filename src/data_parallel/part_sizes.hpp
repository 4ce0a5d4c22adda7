// PartSizes and GrainPlan: a batch and the ranks' parts of it, as far as averaging gradients needs to know.
#pragma once

#include <cstdint>
#include <vector>

namespace lockstep {

// Holds the sizes of a backward's batch and of this rank's part of it. Zeros: not known.
struct PartSizes {
  int64_t local = 0;
  int64_t accumulated = 0;  // local plus the sizes of the parts under no_sync() before it
  int64_t global = 0;
  int32_t mark = 0;  // Batch::mark
  bool by_grains = false;
  bool partial = false;  // see PartOfStep; the sizes are not of whole batches
};

// Tells the ranks' grains of a batch: rank r has those from runs[r] up to runs[r + 1].
struct GrainPlan {
  std::vector<int64_t> runs = {};
  int64_t samples = 0;  // the number of samples in the whole batch
  int32_t mark = 0;     // Batch::mark
  friend bool operator==(const GrainPlan&, const GrainPlan&) = default;
};

// A stand-in for a grain has this number. Its gradients are dropped.
constexpr int64_t kStandIn = -1;

}  // namespace lockstep
