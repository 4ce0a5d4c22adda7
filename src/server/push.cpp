#include "push.hpp"

#include <ATen/ops/_sparse_coo_tensor_unsafe.h>

namespace lockstep::server {
namespace {

// Lays out a payload: the places of its values, one slice after the other.
class Layout {
 public:
  struct Place {
    int64_t numbers, values;  // a sparse slice has both, a whole one only values
  };

  Place next(const Slice& slice, int64_t rows) {
    Place place{bytes_, bytes_};
    if (rows >= 0) {
      bytes_ = aligned(bytes_ + rows * static_cast<int64_t>(sizeof(int64_t)));
      place.values = bytes_;
      bytes_ = aligned(bytes_ + rows * slice.row_bytes());
    } else if (rows == kWhole) {
      bytes_ = aligned(bytes_ + slice.bytes);
    }
    return place;
  }

  int64_t bytes() const { return bytes_; }

 private:
  int64_t bytes_ = 0;
};

// Holds some rows of a slice, with their values.
struct Rows {
  at::Tensor numbers;  // int64 [n]: the rows' numbers in the slice, ascending
  at::Tensor values;   // [n, ...]
};

Rows rows_of(const at::Tensor& sparse, const Slice& slice) {
  const at::Tensor numbers = sparse.indices().select(0, 0);
  const at::Tensor here = numbers.ge(slice.begin).logical_and_(numbers.lt(slice.end)).nonzero().view({-1});
  return {numbers.index_select(0, here) - slice.begin, sparse.values().index_select(0, here)};
}

std::vector<int64_t> with_rows(const Slice& slice, int64_t rows) {
  std::vector<int64_t> sizes = slice.sizes;
  sizes[0] = rows;
  return sizes;
}

}  // namespace

int64_t payload_bytes(const KeyShard& shard, const std::vector<int64_t>& rows) {
  Layout layout;
  for (size_t i = 0; i < shard.slices.size(); ++i) layout.next(shard.slices[i], rows[i]);
  return layout.bytes();
}

Push pack(const KeyShard& shard, const std::vector<at::Tensor>& gradients) {
  Push push;
  std::vector<Rows> sparse(shard.slices.size());
  at::TensorOptions options(at::kByte);
  for (size_t i = 0; i < shard.slices.size(); ++i) {
    const Slice& slice = shard.slices[i];
    const at::Tensor& gradient = gradients[slice.parameter];
    if (gradient.defined()) options = options.device(gradient.device());
    if (gradient.defined() && gradient.is_sparse()) sparse[i] = rows_of(gradient, slice);
    push.rows.push_back(!gradient.defined() ? kNothing : !gradient.is_sparse() ? kWhole : sparse[i].numbers.size(0));
  }
  push.payload = at::empty({payload_bytes(shard, push.rows)}, options);
  Layout layout;
  for (size_t i = 0; i < shard.slices.size(); ++i) {
    const Slice& slice = shard.slices[i];
    const int64_t rows = push.rows[i];
    const auto place = layout.next(slice, rows);
    if (rows == kNothing) continue;
    if (rows == kWhole) {
      const at::Tensor& gradient = gradients[slice.parameter];
      view_at(push.payload, place.values, slice.type, slice.sizes).copy_(slice_of_parameter(gradient, slice));
    } else {
      view_at(push.payload, place.numbers, at::kLong, {rows}).copy_(sparse[i].numbers);
      view_at(push.payload, place.values, slice.type, with_rows(slice, rows)).copy_(sparse[i].values);
    }
  }
  return push;
}

std::vector<at::Tensor> unpack(const KeyShard& shard, const Push& push) {
  std::vector<at::Tensor> gradients;
  Layout layout;
  for (size_t i = 0; i < shard.slices.size(); ++i) {
    const Slice& slice = shard.slices[i];
    const int64_t rows = push.rows[i];
    const auto place = layout.next(slice, rows);
    if (rows == kNothing) {
      gradients.emplace_back();
    } else if (rows == kWhole) {
      gradients.push_back(view_at(push.payload, place.values, slice.type, slice.sizes));
    } else {
      const at::Tensor values = view_at(push.payload, place.values, slice.type, with_rows(slice, rows));
      const at::Tensor numbers = view_at(push.payload, place.numbers, at::kLong, {1, rows});
      gradients.push_back(
          at::_sparse_coo_tensor_unsafe(numbers, values, slice.sizes, values.options().layout(at::kSparse))
              ._coalesced_(true));
    }
  }
  return gradients;
}

}  // namespace lockstep::server
