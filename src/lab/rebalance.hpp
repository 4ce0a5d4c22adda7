// rebalanced: the parts of the next steps, from how long each rank computed its part in the last ones.
//
// Parts cannot simply be set in proportion to n / t, measured once for n samples in t seconds. A step costs a + b n
// seconds. The fixed cost a (queueing kernels, the update, preparing a convolution) does not shrink with the part. So n
// / t depends on n. Parts in proportion to speeds that were measured with equal parts leave the ranks' times unequal.
// Fitting a and b would need parts that differ only for the sake of measuring.
//
// Instead this repeats: n / t of the present parts gives the next parts. They settle where all times t are equal, for
// any a and b. Each look shrinks the distance from there to a / (a + b n) of itself. If a is small, one look is enough.
// If a is nearly everything, it takes more looks, and matters less.
//
// Against noise, parts stay if the slowest rank is less than 3 % above equal times. From nearer than 10 % they go half
// of the way, if that is a sample or more. They change only if a shorter step is promised. The function is pure.
#pragma once

#include <cstdint>
#include <vector>

namespace lockstep {

// `sizes` are the ranks' samples of a full batch, and `seconds` the times that they took. Returns as many sizes with
// the same sum. Each is at least 1, since a rank without samples could not be measured, nor get any back. Returns
// `sizes` itself if none are better, or if a size or a time is not above 0.
std::vector<int64_t> rebalanced(const std::vector<int64_t>& sizes, const std::vector<double>& seconds);

}  // namespace lockstep
