#include "gather.hpp"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include "comm/world.hpp"
#include "rank_place.hpp"

#include <cstring>

namespace lockstep {

namespace {

// Copies a call's result to the host. Throws if the run has failed meanwhile, since a GPU then has no values.
at::Tensor on_the_host(const Rank& rank, const at::Tensor& values) {
  at::Tensor here = values.cpu();
  const auto& place = comm::RankPlace::of(rank);
  place.world().check_values(place.world_rank);
  return here;
}

// Gives the text as uint8, of one dimension, on the CPU.
at::Tensor bytes_of_text(const std::string& text) {
  at::Tensor bytes = at::empty({static_cast<int64_t>(text.size())}, at::kByte);
  if (!text.empty()) std::memcpy(bytes.data_ptr<uint8_t>(), text.data(), text.size());
  return bytes;
}

std::string text_of_bytes(const at::Tensor& bytes) {
  const at::Tensor here = bytes.cpu();
  return {reinterpret_cast<const char*>(here.data_ptr<uint8_t>()), static_cast<size_t>(here.numel())};
}

}  // namespace

at::Tensor of_all_ranks(Rank& rank, const std::vector<int64_t>& numbers) {
  return on_the_host(rank, rank.allgather(at::tensor(numbers, at::kLong).to(rank.device())));
}

std::vector<std::string> texts_of_all_ranks(const std::string& text, Rank& rank) {
  const at::Tensor sizes = of_all_ranks(rank, {static_cast<int64_t>(text.size())});
  const at::Tensor mine = at::zeros({sizes.max().item<int64_t>()}, at::kByte);
  mine.narrow(0, 0, static_cast<int64_t>(text.size())).copy_(bytes_of_text(text));
  const at::Tensor all = on_the_host(rank, rank.allgather(mine.to(rank.device())));
  std::vector<std::string> texts;
  for (int other = 0; other < rank.world_size(); ++other) {
    texts.push_back(text_of_bytes(all[other].narrow(0, 0, sizes[other][0].item<int64_t>())));
  }
  return texts;
}

std::string shared_text(const std::string& text, Rank& rank, int root) {
  at::Tensor size = at::full({1}, static_cast<int64_t>(text.size()), at::kLong).to(rank.device());
  rank.broadcast(size, root);
  const auto bytes_count = on_the_host(rank, size).item<int64_t>();
  if (bytes_count == 0) return {};
  const at::Tensor bytes =
      (rank.index() == root ? bytes_of_text(text) : at::empty({bytes_count}, at::kByte)).to(rank.device());
  rank.broadcast(bytes, root);
  return text_of_bytes(on_the_host(rank, bytes));
}

}  // namespace lockstep
