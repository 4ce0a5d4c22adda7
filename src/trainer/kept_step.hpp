// KeptStep: what one rank of an elastic job has of a step that broke off, since another process was gone.
//
// The ranks that are left finish the step. They leave out the grains that they have, and share out the others. The sums
// have the bits of an undisturbed step.
#pragma once

#include <lockstep/data/parts.hpp>
#include <lockstep/ranks/rank.hpp>

#include "data_parallel/kept_grains.hpp"
#include "totals.hpp"

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace lockstep {

struct KeptStep {
  int epoch = 0;                      // 1 is the first
  int64_t steps = 0;                  // of this epoch that were done before this one
  std::vector<int64_t> weights = {};  // hashes of the parameters with which it was computed
  std::shared_ptr<KeptGrains> grains;
  Totals::Step sums;
};

// Which grains each rank gets of a batch of so many: rank r those from number r of the result up to number r + 1. Each
// gets those that it has. A gap is shared out among the ranks beside it, and those between them that have nothing.
// kept[r] is what rank r has; it may be empty. Empty if
// nobody has anything, or if what they have does not ascend.
std::vector<int64_t> runs_around(const std::vector<Range>& kept, int64_t grains);

// The same, of what all ranks bring of the step that comes next: that of `epoch` after so many others, of a batch of so
// many grains. What is of another step, or does not count, is dropped. All ranks must call it.
std::vector<int64_t> agreed_runs(std::optional<KeptStep>& kept, int epoch, int64_t steps, int64_t grains, Rank& rank);

// As shares of a batch: BatchOptions::shares.
std::vector<double> sizes_of(const std::vector<int64_t>& runs);

}  // namespace lockstep
