#include "key_shards.hpp"

#include <c10/util/accumulate.h>

#include <algorithm>
#include <tuple>

namespace lockstep::server {
namespace {

std::vector<Piece> cut(const std::vector<at::Tensor>& parameters, int64_t piece_bytes) {
  std::vector<Piece> pieces;
  for (size_t number = 0; number < parameters.size(); ++number) {
    const at::Tensor& parameter = parameters[number];
    if (parameter.numel() == 0) continue;
    const int64_t rows = parameter.dim() == 0 ? 1 : parameter.size(0);
    const int64_t row_bytes = static_cast<int64_t>(parameter.nbytes()) / rows;
    const int64_t rows_per_piece = std::max<int64_t>(1, piece_bytes / row_bytes);
    for (int64_t begin = 0; begin < rows; begin += rows_per_piece) {
      const int64_t end = std::min(rows, begin + rows_per_piece);
      std::vector<int64_t> sizes = parameter.dim() == 0 ? std::vector<int64_t>{1} : parameter.sizes().vec();
      sizes[0] = end - begin;
      pieces.push_back({number, begin, end, std::move(sizes), parameter.scalar_type(), (end - begin) * row_bytes});
    }
  }
  return pieces;
}

}  // namespace

int64_t aligned(int64_t offset) {
  constexpr int64_t kAlignment = 16;
  return (offset + kAlignment - 1) / kAlignment * kAlignment;
}

std::vector<KeyShard> shard_keys(const std::vector<at::Tensor>& parameters, int servers, int64_t piece_bytes) {
  std::vector<Piece> pieces = cut(parameters, piece_bytes);
  std::stable_sort(pieces.begin(), pieces.end(), [](auto& a, auto& b) { return a.bytes > b.bytes; });
  std::vector<KeyShard> shards(servers);
  for (const auto& piece : pieces) {
    auto& least = *std::min_element(shards.begin(), shards.end(), [](auto& a, auto& b) { return a.bytes < b.bytes; });
    least.pieces.push_back(piece);
    least.bytes += aligned(piece.bytes);
  }
  for (auto& shard : shards) {
    const auto place = [](const Piece& piece) { return std::tuple(piece.parameter, piece.begin); };
    std::sort(shard.pieces.begin(), shard.pieces.end(), [&](auto& a, auto& b) { return place(a) < place(b); });
    int64_t offset = 0;
    for (auto& piece : shard.pieces) {
      piece.offset = offset;
      offset += aligned(piece.bytes);
    }
  }
  return shards;
}

at::Tensor view_at(const at::Tensor& bytes, int64_t offset, at::ScalarType type, at::IntArrayRef sizes) {
  const int64_t count = c10::multiply_integers(sizes) * static_cast<int64_t>(c10::elementSize(type));
  return bytes.narrow(0, offset, count).view(type).view(sizes);
}

at::Tensor piece_of_shard(const at::Tensor& bytes, const Piece& piece) {
  return view_at(bytes, piece.offset, piece.type, piece.sizes);
}

at::Tensor piece_of_parameter(const at::Tensor& parameter, const Piece& piece) {
  const at::Tensor values = parameter.detach();
  return (values.dim() == 0 ? values.view({1}) : values).narrow(0, piece.begin, piece.end - piece.begin);
}

}  // namespace lockstep::server
