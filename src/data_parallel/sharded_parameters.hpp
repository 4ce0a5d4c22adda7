// Lays parameters in flat memory of which each rank owns one slice. The Optimizer of a sharded net updates the slices.
//
// A bucket holds parameters of one type, one after the other. It ends in zeros that belong to no parameter, so that the
// ranks' slices have equal length. Such zeros fill up each parameter's last line too. Buckets are the same on all
// ranks.
//
// Parameters and slices begin at whole lines of values. LibTorch's kernels compute the last values of a tensor one by
// one, and may round them otherwise than those before. A slice cut within a line would change which values these are,
// and so an update's bits.
#pragma once

#include <ATen/core/Tensor.h>
#include <lockstep/data_parallel/options.hpp>
#include <lockstep/ranks/rank.hpp>

#include "ranks/trained_parameters.hpp"

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace lockstep {

struct ShardedBucket {
  struct Slice {               // a parameter's values in a rank's slice, in the order of its memory
    int64_t size = 0;          // the number of values; 0: none
    int64_t in_parameter = 0;  // the place of the first in the parameter
    int64_t in_slice = 0;      // the place of the first in the slice
    at::Tensor values = {};    // a view into the slice, for an optimizer: needs a gradient; undefined if there are none
  };
  struct Place {
    std::string name;
    at::Tensor parameter;  // a view into values, with its shape and strides
    int64_t offset;
    Slice slice = {};  // this rank's slice
  };
  std::vector<Place> places;
  int64_t size = 0;   // the size of all parameters together, in whole lines
  at::Tensor values;  // the ranks' slices, one after the other: [ranks * slice]
  at::Tensor slice;   // this rank's slice of values: a view, or memory of its own

  // Gives a parameter's place in a flat tensor like `values`, with the parameter's shape and strides.
  static at::Tensor view(const Place& place, const at::Tensor& flat);
};

// Moves the parameters, which are on the rank's device, into buckets of about `bucket_bytes`. The last parameters come
// first, because their gradients do. With `own_slices` a slice is a copy: the rest may be given back.
std::vector<ShardedBucket> shard_parameters(const NamedParameters& parameters, const Rank& rank, int64_t bucket_bytes,
                                            bool own_slices = false);

// A call with fewer bytes costs more than sending them.
constexpr int64_t kLeastUnitBytes = 64 << 10;

// Gives the parameters of each unit, in their order. Each module in options.units is one unit. The others are taken in
// runs of at most options.bucket_bytes, a sixteenth of the net, and an eighth of a rank's slice of it. Such a run has
// at least one whole module, and at least kLeastUnitBytes (or options.bucket_bytes), for which it takes one module
// more. Throws Error for a name of no module with such parameters, or of a module within another one.
std::vector<NamedParameters> units_of(const NamedParameters& parameters, const DataParallelOptions& options,
                                      const Rank& rank);

// Moves the parameters into buckets that have slices of their own, the last unit first. A unit is a bucket; one of
// several types is a bucket for each type.
std::vector<ShardedBucket> shard_in_units(const NamedParameters& parameters, const DataParallelOptions& options,
                                          const Rank& rank);

// Gives this rank's slices under the parameters' names, in the order of the buckets and their places. A parameter has
// one slice here, or none.
NamedParameters slices_of(const std::vector<ShardedBucket>& buckets);

// Gives this rank's slice of a flat tensor like `values`: a view.
at::Tensor slice_of_flat(const at::Tensor& flat, const Rank& rank);

// Puts the ranks' slices together in `flat`. Posts all before it waits for the first. Call it on all ranks.
void gather_slices(const std::vector<std::pair<at::Tensor, at::Tensor>>& flats_and_slices, Rank& rank);

}  // namespace lockstep
