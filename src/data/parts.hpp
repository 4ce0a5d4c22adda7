// Parts: cuts a batch into the ranges of samples that devices take, near-equal ones or by shares.
//
// Parts follow each other in order and may be empty. Near-equal: n samples over k parts give every part n / k, and the
// first n % k parts one more. Shares are numbers in any unit, one per part: {2, 1} gives the first part two thirds. The
// functions are pure and thread-safe.
#pragma once

#include <lockstep/base/error.hpp>
#include <lockstep/data/data.hpp>

#include <cstdint>
#include <string>
#include <vector>

namespace lockstep {

using Range = Batch::Range;

// Gives part `index` of `total` samples over `count` parts. Throws Error unless 0 <= index < count and total >= 0.
Range part_of(int64_t total, int index, int count);

// ---- By shares, for devices that are not equally fast

// Gives the sizes of all parts of `total` samples, by the method of the largest remainder. Each part gets its quota
// rounded down. The samples left go, one each, to the parts that lost most by rounding; the first wins a tie. So sizes
// add up exactly, differ from their quotas by less than one, and equal shares give near-equal parts. A share of 0 gives
// an empty part. The same numbers give the same sizes on every machine. Throws Error: no shares, or shares that
// check_shares refuses; total < 0 or above 2^40, where rounding could reach whole samples.
std::vector<int64_t> sizes_by_shares(int64_t total, const std::vector<double>& shares);

// Throws Error, which names `user`, unless there are `count` shares, all finite, none below 0, and one above 0.
void check_shares(const std::vector<double>& shares, int count, const std::string& user, const Error::Data& data = {});

}  // namespace lockstep
