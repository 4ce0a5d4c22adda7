// ElasticBounds: how many processes an elastic job may have, in which others go on when some are killed
// (docs/processes.md). A plain value.
#pragma once

#include <string>

namespace lockstep {

struct ElasticBounds {
  int fewest = 0;  // with which it goes on
  int most = 0;    // 0: the job need not be elastic
  bool operator==(const ElasticBounds&) const = default;
};

std::string to_string(const ElasticBounds& bounds);          // "2:4"; "none": the job need not be elastic
ElasticBounds elastic_bounds_from(const std::string& text);  // throws Error: neither "none" nor 1 <= MIN <= MAX

}  // namespace lockstep
