// Which parameters, and which of their rows, each server keeps. Pure functions, equal on all ranks.
//
// A parameter is cut along its first dimension into pieces of at most a given size, or one row; a number (no
// dimensions) is one row. So a piece keeps the shape of its rows, and a sparse gradient's rows belong to one piece
// each.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace lockstep::server {

struct Piece {
  size_t parameter = 0;             // its number
  int64_t begin = 0, end = 0;       // its rows
  std::vector<int64_t> sizes = {};  // of the piece: [end - begin, ...]
  at::ScalarType type = at::ScalarType::Undefined;
  int64_t bytes = 0;
  int64_t offset = 0;  // in its shard, in bytes

  int64_t row_bytes() const { return bytes / (end - begin); }
};

// What one server keeps: its pieces, one after the other in one row of bytes.
struct KeyShard {
  std::vector<Piece> pieces = {};  // by parameter and row
  int64_t bytes = 0;
};

// Puts every row of every parameter into one shard. The largest pieces come first, each to the server with the least so
// far.
std::vector<KeyShard> shard_keys(const std::vector<at::Tensor>& parameters, int servers, int64_t piece_bytes);

// Where typed values may begin among bytes.
int64_t aligned(int64_t offset);

// Three views: `sizes` values of `type` from byte `offset` on; a piece in its shard's bytes; a piece in its parameter.
at::Tensor view_at(const at::Tensor& bytes, int64_t offset, at::ScalarType type, at::IntArrayRef sizes);
at::Tensor piece_of_shard(const at::Tensor& bytes, const Piece& piece);
at::Tensor piece_of_parameter(const at::Tensor& parameter, const Piece& piece);

}  // namespace lockstep::server
