// Decides which parameters, and which of their rows, each server keeps. The functions are pure, and equal on all ranks.
//
// A parameter is cut along its first dimension into slices of at most a given size, or one row. A number (no
// dimensions) is one row. So a slice keeps the shape of its rows, and each row of a sparse gradient belongs to one
// slice.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace lockstep::server {

struct Slice {
  size_t parameter = 0;             // the parameter's number
  int64_t begin = 0, end = 0;       // the rows [begin, end) of the parameter
  std::vector<int64_t> sizes = {};  // the slice's sizes: [end - begin, ...]
  at::ScalarType type = at::ScalarType::Undefined;
  int64_t bytes = 0;
  int64_t offset = 0;  // the slice's first byte in its shard

  int64_t row_bytes() const { return bytes / (end - begin); }
};

// Holds the slices of one server, one after the other in one row of bytes.
struct KeyShard {
  std::vector<Slice> slices = {};  // ordered by parameter and row
  int64_t bytes = 0;
};

// Puts every row of every parameter into one shard. The largest slices come first; each goes to the server with the
// fewest bytes so far.
std::vector<KeyShard> shard_keys(const std::vector<at::Tensor>& parameters, int servers, int64_t slice_bytes);

// Gives the next place among bytes where typed values may begin.
int64_t aligned(int64_t offset);

// These make views: `sizes` values of `type` from byte `offset` on; a slice in its shard's bytes, or in the parameter.
at::Tensor view_at(const at::Tensor& bytes, int64_t offset, at::ScalarType type, at::IntArrayRef sizes);
at::Tensor slice_in_shard(const at::Tensor& bytes, const Slice& slice);
at::Tensor slice_of_parameter(const at::Tensor& parameter, const Slice& slice);

}  // namespace lockstep::server
