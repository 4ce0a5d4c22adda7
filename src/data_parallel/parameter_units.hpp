// Units of parameters, which are gathered and given back together: see DividedParameters.
#pragma once

#include <lockstep/data_parallel/options.hpp>
#include <lockstep/ranks/rank.hpp>

#include "ranks/trained_parameters.hpp"
#include "sharded_parameters.hpp"

#include <cstdint>
#include <vector>

namespace lockstep {

// A call with fewer bytes costs more than sending them.
constexpr int64_t kLeastUnitBytes = 64 << 10;

// Gives the parameters of each unit, in their order. Each module in options.units is one. The others are taken in runs
// of at most options.bucket_bytes, a sixteenth of the net, and an eighth of a rank's slice of it. Such a run has at
// least one whole module, and at least kLeastUnitBytes (or options.bucket_bytes), for which it takes one module more.
// Throws Error for a name of no module with such parameters, or of a module within another one.
std::vector<NamedParameters> units_of(const NamedParameters& parameters, const DataParallelOptions& options,
                                      const Rank& rank);

// Moves the parameters into buckets that have slices of their own, the last unit first. A unit is a bucket; one of
// several types is a bucket for each type.
std::vector<ShardedBucket> shard_in_units(const NamedParameters& parameters, const DataParallelOptions& options,
                                          const Rank& rank);

}  // namespace lockstep
