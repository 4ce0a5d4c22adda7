#include "shared_text.hpp"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <cstring>

namespace lockstep {

at::Tensor bytes_of_text(const std::string& text) {
  at::Tensor bytes = at::empty({static_cast<int64_t>(text.size())}, at::kByte);
  if (!text.empty()) std::memcpy(bytes.data_ptr<uint8_t>(), text.data(), text.size());
  return bytes;
}

std::string text_of_bytes(const at::Tensor& bytes) {
  const at::Tensor here = bytes.cpu();
  return {reinterpret_cast<const char*>(here.data_ptr<uint8_t>()), static_cast<size_t>(here.numel())};
}

std::string shared_text(const std::string& text, Rank& rank, int root) {
  at::Tensor size = at::full({1}, static_cast<int64_t>(text.size()), at::kLong).to(rank.device());
  rank.broadcast(size, root);
  const int64_t bytes_count = size.item<int64_t>();
  if (bytes_count == 0) return {};
  const at::Tensor bytes =
      (rank.index() == root ? bytes_of_text(text) : at::empty({bytes_count}, at::kByte)).to(rank.device());
  rank.broadcast(bytes, root);
  return text_of_bytes(bytes);
}

}  // namespace lockstep
