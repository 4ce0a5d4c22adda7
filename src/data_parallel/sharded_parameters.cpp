#include "sharded_parameters.hpp"

#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include "flat_view.hpp"

#include <algorithm>
#include <map>

namespace lockstep {
namespace {

constexpr int64_t kLine = 64;  // a line's values: two vectors of bfloat16, or more of other types

int64_t in_lines(int64_t values) {
  return (values + kLine - 1) / kLine * kLine;
}

// Gives the piece of a place that lies in the slice of rank `number`.
ShardedBucket::Piece piece_in(const at::Tensor& slice, int64_t number, const ShardedBucket::Place& place) {
  const int64_t begin = slice.numel() * number, end = begin + slice.numel();
  const int64_t first = std::max(begin, place.offset), last = std::min(end, place.offset + place.parameter.numel());
  if (first >= last) return {};
  ShardedBucket::Piece piece{.size = last - first, .in_parameter = first - place.offset, .in_slice = first - begin};
  // variable_data: an optimizer cannot be made of a view in autograd's eyes.
  piece.values = slice.narrow(0, piece.in_slice, piece.size).variable_data();
  piece.values.requires_grad_();
  return piece;
}

void flatten(ShardedBucket& bucket, const Rank& rank, bool own_slices) {
  const c10::NoGradGuard no_grad;
  const int64_t ranks = rank.world_size(), of_each = in_lines((bucket.size + ranks - 1) / ranks);
  bucket.values = at::zeros({of_each * ranks}, bucket.places[0].parameter.options().requires_grad(false));
  for (auto& place : bucket.places) {
    const at::Tensor value = ShardedBucket::view(place, bucket.values);
    value.copy_(place.parameter);
    place.parameter.set_data(value);
  }
  bucket.slice = slice_of_flat(bucket.values, rank);
  if (own_slices) bucket.slice = bucket.slice.clone();
  for (auto& place : bucket.places) place.piece = piece_in(bucket.slice, rank.index(), place);
}

}  // namespace

at::Tensor ShardedBucket::view(const Place& place, const at::Tensor& flat) {
  return view_in_flat(place.parameter, flat, place.offset);
}

std::vector<ShardedBucket> shard_parameters(const std::vector<std::pair<std::string, at::Tensor>>& parameters,
                                            const Rank& rank, int64_t bucket_bytes, bool own_slices) {
  std::vector<ShardedBucket> buckets;
  std::map<at::ScalarType, ShardedBucket> filling;
  for (size_t i = parameters.size(); i-- > 0;) {
    const auto& [name, parameter] = parameters[i];
    const auto type = parameter.scalar_type();
    ShardedBucket& bucket = filling[type];
    bucket.places.push_back({.name = name, .parameter = parameter, .offset = bucket.size});
    bucket.size += in_lines(parameter.numel());
    if (bucket.size * static_cast<int64_t>(parameter.element_size()) < bucket_bytes) continue;
    buckets.push_back(std::move(bucket));
    filling.erase(type);
  }
  for (auto& [type, bucket] : filling) buckets.push_back(std::move(bucket));
  for (auto& bucket : buckets) flatten(bucket, rank, own_slices);
  return buckets;
}

std::vector<at::Tensor> pieces_of(const std::vector<ShardedBucket>& buckets) {
  std::vector<at::Tensor> pieces;
  for (const auto& bucket : buckets) {
    for (const auto& place : bucket.places) {
      if (place.piece.size > 0) pieces.push_back(place.piece.values);
    }
  }
  return pieces;
}

at::Tensor slice_of_flat(const at::Tensor& flat, const Rank& rank) {
  const int64_t of_each = flat.numel() / rank.world_size();
  return flat.narrow(0, of_each * rank.index(), of_each);
}

void gather_slices(const std::vector<std::pair<at::Tensor, at::Tensor>>& flats_and_slices, Rank& rank) {
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  for (const auto& [flat, slice] : flats_and_slices) {
    at::Tensor all = flat, mine = slice;
    works.push_back(rank.backend()._allgather_base(all, mine, c10d::AllgatherOptions{}));
  }
  for (const auto& work : works) work->wait();
}

}  // namespace lockstep
