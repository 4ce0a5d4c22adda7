#include "push.hpp"

#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/empty.h>

namespace lockstep::server {
namespace {

// Lays out a payload: the places of its values, one piece after the other.
class Layout {
 public:
  struct Place {
    int64_t numbers, values;  // a sparse piece has both, a whole one only values
  };

  Place next(const Piece& piece, int64_t rows) {
    Place place{bytes_, bytes_};
    if (rows >= 0) {
      bytes_ = aligned(bytes_ + rows * static_cast<int64_t>(sizeof(int64_t)));
      place.values = bytes_;
      bytes_ = aligned(bytes_ + rows * piece.row_bytes());
    } else if (rows == kWhole) {
      bytes_ = aligned(bytes_ + piece.bytes);
    }
    return place;
  }

  int64_t bytes() const { return bytes_; }

 private:
  int64_t bytes_ = 0;
};

// Holds some rows of a piece, with their values.
struct Rows {
  at::Tensor numbers;  // int64 [n]: the rows' numbers in the piece, ascending
  at::Tensor values;   // [n, ...]
};

Rows rows_of(const at::Tensor& sparse, const Piece& piece) {
  const at::Tensor numbers = sparse.indices().select(0, 0);
  const at::Tensor here = numbers.ge(piece.begin).logical_and_(numbers.lt(piece.end)).nonzero().view({-1});
  return {numbers.index_select(0, here) - piece.begin, sparse.values().index_select(0, here)};
}

std::vector<int64_t> with_rows(const Piece& piece, int64_t rows) {
  std::vector<int64_t> sizes = piece.sizes;
  sizes[0] = rows;
  return sizes;
}

}  // namespace

int64_t payload_bytes(const KeyShard& shard, const std::vector<int64_t>& rows) {
  Layout layout;
  for (size_t i = 0; i < shard.pieces.size(); ++i) layout.next(shard.pieces[i], rows[i]);
  return layout.bytes();
}

Push pack(const KeyShard& shard, const std::vector<at::Tensor>& gradients) {
  Push push;
  std::vector<Rows> sparse(shard.pieces.size());
  at::TensorOptions options(at::kByte);
  for (size_t i = 0; i < shard.pieces.size(); ++i) {
    const Piece& piece = shard.pieces[i];
    const at::Tensor& gradient = gradients[piece.parameter];
    if (gradient.defined()) options = options.device(gradient.device());
    if (gradient.defined() && gradient.is_sparse()) sparse[i] = rows_of(gradient, piece);
    push.rows.push_back(!gradient.defined() ? kNothing : !gradient.is_sparse() ? kWhole : sparse[i].numbers.size(0));
  }
  push.payload = at::empty({payload_bytes(shard, push.rows)}, options);
  Layout layout;
  for (size_t i = 0; i < shard.pieces.size(); ++i) {
    const Piece& piece = shard.pieces[i];
    const int64_t rows = push.rows[i];
    const auto place = layout.next(piece, rows);
    if (rows == kNothing) continue;
    if (rows == kWhole) {
      const at::Tensor& gradient = gradients[piece.parameter];
      view_at(push.payload, place.values, piece.type, piece.sizes).copy_(piece_of_parameter(gradient, piece));
    } else {
      view_at(push.payload, place.numbers, at::kLong, {rows}).copy_(sparse[i].numbers);
      view_at(push.payload, place.values, piece.type, with_rows(piece, rows)).copy_(sparse[i].values);
    }
  }
  return push;
}

std::vector<at::Tensor> unpack(const KeyShard& shard, const Push& push) {
  std::vector<at::Tensor> gradients;
  Layout layout;
  for (size_t i = 0; i < shard.pieces.size(); ++i) {
    const Piece& piece = shard.pieces[i];
    const int64_t rows = push.rows[i];
    const auto place = layout.next(piece, rows);
    if (rows == kNothing) {
      gradients.emplace_back();
    } else if (rows == kWhole) {
      gradients.push_back(view_at(push.payload, place.values, piece.type, piece.sizes));
    } else {
      const at::Tensor values = view_at(push.payload, place.values, piece.type, with_rows(piece, rows));
      const at::Tensor numbers = view_at(push.payload, place.numbers, at::kLong, {1, rows});
      gradients.push_back(
          at::_sparse_coo_tensor_unsafe(numbers, values, piece.sizes, values.options().layout(at::kSparse))
              ._coalesced_(true));
    }
  }
  return gradients;
}

}  // namespace lockstep::server
