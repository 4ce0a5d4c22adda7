#include "key_shards.hpp"

#include <c10/util/accumulate.h>

#include <algorithm>
#include <tuple>

namespace lockstep::server {
namespace {

std::vector<Slice> cut(const std::vector<at::Tensor>& parameters, int64_t slice_bytes) {
  std::vector<Slice> slices;
  for (size_t number = 0; number < parameters.size(); ++number) {
    const at::Tensor& parameter = parameters[number];
    if (parameter.numel() == 0) continue;
    const int64_t rows = parameter.dim() == 0 ? 1 : parameter.size(0);
    const int64_t row_bytes = static_cast<int64_t>(parameter.nbytes()) / rows;
    const int64_t rows_per_slice = std::max<int64_t>(1, slice_bytes / row_bytes);
    for (int64_t begin = 0; begin < rows; begin += rows_per_slice) {
      const int64_t end = std::min(rows, begin + rows_per_slice);
      std::vector<int64_t> sizes = parameter.dim() == 0 ? std::vector<int64_t>{1} : parameter.sizes().vec();
      sizes[0] = end - begin;
      slices.push_back({number, begin, end, std::move(sizes), parameter.scalar_type(), (end - begin) * row_bytes});
    }
  }
  return slices;
}

}  // namespace

int64_t aligned(int64_t offset) {
  constexpr int64_t kAlignment = 16;
  return (offset + kAlignment - 1) / kAlignment * kAlignment;
}

std::vector<KeyShard> shard_keys(const std::vector<at::Tensor>& parameters, int servers, int64_t slice_bytes) {
  std::vector<Slice> slices = cut(parameters, slice_bytes);
  std::stable_sort(slices.begin(), slices.end(), [](auto& a, auto& b) { return a.bytes > b.bytes; });
  std::vector<KeyShard> shards(servers);
  for (const auto& slice : slices) {
    auto& least = *std::min_element(shards.begin(), shards.end(), [](auto& a, auto& b) { return a.bytes < b.bytes; });
    least.slices.push_back(slice);
    least.bytes += aligned(slice.bytes);
  }
  for (auto& shard : shards) {
    const auto place = [](const Slice& slice) { return std::tuple(slice.parameter, slice.begin); };
    std::sort(shard.slices.begin(), shard.slices.end(), [&](auto& a, auto& b) { return place(a) < place(b); });
    int64_t offset = 0;
    for (auto& slice : shard.slices) {
      slice.offset = offset;
      offset += aligned(slice.bytes);
    }
  }
  return shards;
}

at::Tensor view_at(const at::Tensor& bytes, int64_t offset, at::ScalarType type, at::IntArrayRef sizes) {
  const int64_t count = c10::multiply_integers(sizes) * static_cast<int64_t>(c10::elementSize(type));
  return bytes.narrow(0, offset, count).view(type).view(sizes);
}

at::Tensor slice_in_shard(const at::Tensor& bytes, const Slice& slice) {
  return view_at(bytes, slice.offset, slice.type, slice.sizes);
}

at::Tensor slice_of_parameter(const at::Tensor& parameter, const Slice& slice) {
  const at::Tensor values = parameter.detach();
  return (values.dim() == 0 ? values.view({1}) : values).narrow(0, slice.begin, slice.end - slice.begin);
}

}  // namespace lockstep::server
