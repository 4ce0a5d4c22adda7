// rebalanced: the parts of the next steps, from how long each rank computed its part in the last ones.
//
// Not "n samples in t seconds, so parts in proportion to n / t, measured once": a step costs a + b n seconds, with
// a (queueing kernels, the update, what a convolution prepares) that does not shrink with the part, so n / t is another
// number for another n, and parts in proportion to speeds that were measured with equal parts leave the ranks' times
// unequal. Fitting a and b would need parts that differ for no other reason than to be measured. Instead this repeats:
// n / t of the present parts gives the next ones, and they rest where all times t are equal, for any a and b. On the
// way the distance from there shrinks to a / (a + b n) of itself by each look: at once if a is small. Where a is nearly
// everything that takes more looks, and matters less.
//
// Against noise: parts stay if the slowest rank is less than 3 % above equal times; from nearer than 10 % they go half
// the way, if that is a sample or more; and only where a shorter step is promised. Pure.
#pragma once

#include <cstdint>
#include <vector>

namespace lockstep {

// `sizes` are the ranks' samples of a full batch, `seconds` what they took for them. Returns as many sizes with the
// same sum, each at least 1: a rank without samples could not be measured any more, nor get any back. Returns `sizes`
// itself if there are no better ones, or if a size or a time is not above 0, which is no measurement.
std::vector<int64_t> rebalanced(const std::vector<int64_t>& sizes, const std::vector<double>& seconds);

}  // namespace lockstep
