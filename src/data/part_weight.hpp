// part_weight: says how much one part of a batch counts in an average over the parts.
#pragma once

#include <lockstep/base/error.hpp>

#include <string>

#include "base/number_text.hpp"

namespace lockstep {

// Gives the weight of a part. An average over `parts` weighs all parts equally, so a part with more samples than the
// average needs a larger weight. Then the average of the parts' mean losses is the mean loss of the batch. Throws
// Error, which names `user`, for impossible sizes.
inline double part_weight(double local_size, double global_size, int parts, const std::string& user) {
  if (!(local_size >= 0 && global_size > 0 && local_size <= global_size)) {
    throw Error(user + ": a part of " + number_text(local_size) + " samples of a global batch of " +
                number_text(global_size) + "; a part has 0 to all of the batch's samples, and the batch at least 1");
  }
  return local_size * parts / global_size;
}

}  // namespace lockstep
