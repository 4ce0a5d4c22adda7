#include "joined_pieces.hpp"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/GradMode.h>
#include <nlohmann/json.hpp>

#include <cstdint>
#include <map>
#include <string>
#include <utility>

#include "ranks/gather.hpp"

namespace lockstep {
namespace {

using nlohmann::json;

struct Held {  // a piece that a rank has told of
  int rank;
  size_t number;  // of the rank's pieces
  int64_t begin, size;
};

struct Whole {
  std::vector<int64_t> sizes, strides;
  at::ScalarType type;
  std::vector<Held> held;  // by rank
};

struct Given {  // a part of a piece that becomes a part of a whole tensor
  size_t number;
  int64_t in_piece;
  at::Tensor to;  // bytes
};

json told(const std::vector<StatePiece>& pieces) {
  json list = json::array();
  for (const auto& piece : pieces) {
    list.push_back({piece.name, piece.sizes, piece.strides, static_cast<int>(piece.values.scalar_type()), piece.begin,
                    piece.values.numel()});
  }
  return list;
}

std::map<std::string, Whole> wholes_of(const std::vector<std::string>& texts) {
  std::map<std::string, Whole> wholes;
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    const json list = json::parse(texts[rank]);
    for (size_t number = 0; number < list.size(); ++number) {
      const json& piece = list[number];
      Whole& whole = wholes[piece[0].get<std::string>()];
      whole.sizes = piece[1].get<std::vector<int64_t>>();
      whole.strides = piece[2].get<std::vector<int64_t>>();
      whole.type = static_cast<at::ScalarType>(piece[3].get<int>());
      whole.held.push_back({static_cast<int>(rank), number, piece[4].get<int64_t>(), piece[5].get<int64_t>()});
    }
  }
  return wholes;
}

at::Tensor as_bytes(const at::Tensor& values) {
  return values.reshape({-1}).view(at::kByte);
}

// Its first holder, for the values from `position` on.
const Held& holder_of(const std::string& name, const Whole& whole, int64_t position) {
  for (const Held& held : whole.held) {
    if (held.begin <= position && position < held.begin + held.size) return held;
  }
  throw StateLost("both ranks that kept a slice are gone, and with them what they had of '" + name + "'");
}

}  // namespace

io::NamedTensors joined_pieces(const std::vector<StatePiece>& mine, Rank& rank) {
  const c10::NoGradGuard no_grad;
  io::NamedTensors joined;
  std::vector<std::vector<Given>> given(static_cast<size_t>(rank.world_size()));  // by rank
  for (const auto& [name, whole] : wholes_of(texts_of_all_ranks(told(mine).dump(), rank))) {
    const auto options = at::TensorOptions(rank.device()).dtype(whole.type);
    joined.emplace_back(name, at::empty_strided(whole.sizes, whole.strides, options));
    const at::Tensor& tensor = joined.back().second;
    const at::Tensor bytes = tensor.as_strided({tensor.numel()}, {1}).view(at::kByte);
    const auto width = static_cast<int64_t>(tensor.element_size());
    for (int64_t position = 0; position < tensor.numel();) {
      const Held& held = holder_of(name, whole, position);
      const int64_t end = held.begin + held.size;
      given[static_cast<size_t>(held.rank)].push_back(
          {held.number, (position - held.begin) * width, bytes.slice(0, position * width, end * width)});
      position = end;
    }
  }
  for (int giver = 0; giver < rank.world_size(); ++giver) {
    const auto& parts = given[static_cast<size_t>(giver)];
    int64_t count = 0;
    for (const Given& part : parts) count += part.to.numel();
    if (count == 0) continue;
    std::vector<at::Tensor> values;
    if (giver == rank.index()) {
      for (const Given& part : parts)
        values.push_back(as_bytes(mine[part.number].values).narrow(0, part.in_piece, part.to.numel()));
    }
    const at::Tensor all =
        values.empty() ? at::empty({count}, at::TensorOptions(rank.device()).dtype(at::kByte)) : at::cat(values);
    rank.broadcast(all, giver);
    int64_t begin = 0;
    for (const Given& part : parts) {
      part.to.copy_(all.narrow(0, begin, part.to.numel()));
      begin += part.to.numel();
    }
  }
  return joined;
}

}  // namespace lockstep
