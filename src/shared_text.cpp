#include "shared_text.hpp"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <cstring>

namespace lockstep {

std::string shared_text(const std::string& text, Rank& rank, int root) {
  at::Tensor size = at::full({1}, static_cast<int64_t>(text.size()), at::kLong).to(rank.device());
  rank.broadcast(size, root);
  at::Tensor bytes = at::empty({size.item<int64_t>()}, at::kByte);
  if (bytes.numel() == 0) return {};
  if (rank.index() == root) std::memcpy(bytes.data_ptr<uint8_t>(), text.data(), text.size());
  bytes = bytes.to(rank.device());
  rank.broadcast(bytes, root);
  bytes = bytes.cpu();
  return {reinterpret_cast<const char*>(bytes.data_ptr<uint8_t>()), static_cast<size_t>(bytes.numel())};
}

}  // namespace lockstep
