// Shares: unequal parts of a batch, for devices that are not equally fast.
//
// Shares are numbers in any unit, one per part: {2, 1} gives the first part two thirds of the samples. Part sizes are
// whole by the method of the largest remainder: each part gets its quota rounded down, and what is left goes, one
// sample each, to the parts that lost most by it, of equals to the first. So sizes add up exactly, differ from their
// quotas by less than one, and equal shares give the parts of split.hpp. Pure functions.
#pragma once

#include <lockstep/data/split.hpp>

#include <cstdint>
#include <string>
#include <vector>

namespace lockstep {

// Throws Error, which names `user`, unless there are `count` shares, all finite and none below 0, and one above 0.
void check_shares(const std::vector<double>& shares, int count, const std::string& user);

// The sizes of all parts of `total` samples. A share of 0 gives an empty part. The same numbers give the same sizes on
// every machine. Throws Error: no shares, or such that check_shares refuses; total < 0 or above 2^40, where rounding
// could reach whole samples.
std::vector<int64_t> sizes_by_shares(int64_t total, const std::vector<double>& shares);

// Part `index` of them, in order. Throws Error as sizes_by_shares does; an index without a share.
Range part_of(int64_t total, int index, const std::vector<double>& shares);

}  // namespace lockstep
