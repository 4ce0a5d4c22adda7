// Reads a run's BatchSettings: the parts of a batch, the samples of an epoch, and remarks for the user.
#pragma once

#include <lockstep/trainer/train_options.hpp>

#include <cstdint>
#include <string>
#include <vector>

namespace lockstep {

// Gives the samples of a grain; 0: there are none.
int64_t grain_of(const BatchSettings& batch);

// balances() tells whether parts follow the devices' measured speed. shares_of() gives the shares that `balance` names,
// none for "equal" and "auto".
bool balances(const BatchSettings& batch);
std::vector<double> shares_of(const BatchSettings& batch);

// Gives the sizes of the parts of `total` by these shares, one per rank; without any, of near-equal parts.
std::vector<int64_t> sizes_of_parts(int64_t total, const std::vector<double>& shares, int ranks);

// Tells how many of the samples an epoch trains on.
int64_t samples_of_epoch(const BatchSettings& batch, int64_t samples);

// Says that a BatchNorm may refuse the last batch of an epoch, and what to do, if this batch is smaller and a rank
// computes one sample of it alone. Else gives "".
std::string remark_on_last_batch(const BatchSettings& batch, int64_t samples, int ranks);

// Gives a remark for the user if a batch has fewer grains than `ranks` along the data axis; else "".
std::string remark_on_idle_ranks(const BatchSettings& batch, int ranks);

// Gives the parts of a full batch, in samples, of so many ranks, by these shares; without any, near-equal parts. With a
// grain each part has whole grains.
std::vector<int64_t> parts_of_full_batch(const BatchSettings& batch, const std::vector<double>& shares, int ranks);

}  // namespace lockstep
