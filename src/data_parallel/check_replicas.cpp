#include <lockstep/base/error.hpp>
#include <lockstep/data_parallel/check_replicas.hpp>

#include "base/scramble.hpp"
#include "ranks/gather.hpp"
#include "ranks/rank_place.hpp"
#include "running_statistics_names.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace lockstep {
namespace {

// Four lanes, so that one product need not wait for another.
uint64_t hash_of(const at::Tensor& tensor) {
  const at::Tensor here = tensor.detach().cpu().contiguous();
  std::array<uint64_t, 4> lanes{kGolden, kGolden + 1, kGolden + 2, kGolden + 3};
  const auto add = [&](const std::array<uint64_t, 4>& block) {
    for (size_t i = 0; i < 4; ++i) {
      lanes[i] = (lanes[i] ^ block[i]) * kScramble[0];
      lanes[i] ^= lanes[i] >> 32;
    }
  };
  std::array<uint64_t, 4> block{};
  const auto* bytes = static_cast<const char*>(here.const_data_ptr());
  size_t left = here.nbytes();
  for (; left >= sizeof block; left -= sizeof block, bytes += sizeof block) {
    std::memcpy(block.data(), bytes, sizeof block);
    add(block);
  }
  block = {};
  if (left > 0) std::memcpy(block.data(), bytes, left);
  add(block);
  uint64_t hash = here.nbytes();
  for (const uint64_t lane : lanes) hash = scramble(hash ^ lane);
  return hash;
}

// What the ranks found in their networks: one row of hashes per rank, and the tensors' names.
struct Hashes {
  std::vector<std::string> ranks;
  std::vector<std::string> tensors;
  std::vector<std::vector<int64_t>> rows;
};

std::vector<std::pair<std::string, at::Tensor>> compared_tensors(const torch::nn::Module& module) {
  std::vector<std::pair<std::string, at::Tensor>> tensors;
  for (const auto& item : module.named_parameters()) tensors.emplace_back(item.key(), item.value());
  for (const auto& item : module.named_buffers()) {
    if (!is_running_statistic(item.key())) tensors.emplace_back(item.key(), item.value());
  }
  return tensors;
}

Hashes hashes_of_all(const torch::nn::Module& module, Rank& rank) {
  const auto& place = comm::RankPlace::of(rank);
  const auto tensors = compared_tensors(module);
  const auto count = static_cast<int64_t>(tensors.size());
  const at::Tensor of_ranks = of_all_ranks(rank, {place.world_rank, count});
  Hashes all;
  for (int other = 0; other < rank.world_size(); ++other) {
    all.ranks.push_back(comm::name_of(static_cast<int>(of_ranks[other][0].item<int64_t>()), place.run->devices));
    const auto theirs = of_ranks[other][1].item<int64_t>();
    if (theirs == count) continue;
    throw Error(rank.name() + ": check_replicas: the ranks' networks differ: there are " + std::to_string(count) +
                " parameters and buffers, and " + std::to_string(theirs) + " on " + all.ranks.back());
  }
  std::vector<int64_t> hashes;
  for (const auto& [name, tensor] : tensors) {
    all.tensors.push_back(name);
    hashes.push_back(static_cast<int64_t>(hash_of(tensor)));
  }
  const at::Tensor table = of_all_ranks(rank, hashes).contiguous();
  const auto* cells = table.const_data_ptr<int64_t>();
  for (int other = 0; other < rank.world_size(); ++other)
    all.rows.emplace_back(cells + other * count, cells + (other + 1) * count);
  return all;
}

// "rank 1 (cpu) and rank 3 (cpu)"
std::string names_of(const Hashes& all, const std::vector<size_t>& ranks) {
  std::string text;
  for (const size_t rank : ranks) text += (text.empty() ? "" : " and ") + all.ranks[rank];
  return text;
}

std::string difference(const Hashes& all, size_t one, size_t other) {
  std::string first;
  size_t more = 0;
  for (size_t i = 0; i < all.tensors.size(); ++i) {
    if (all.rows[one][i] == all.rows[other][i]) continue;
    first.empty() ? void(first = all.tensors[i]) : void(++more);
  }
  return first + (more == 0 ? "" : " and " + std::to_string(more) + " more");
}

// Empty if all are equal.
std::string differences(const Hashes& all) {
  std::map<std::vector<int64_t>, std::vector<size_t>> by_row;
  for (size_t rank = 0; rank < all.rows.size(); ++rank) by_row[all.rows[rank]].push_back(rank);
  if (by_row.size() == 1) return "";
  std::vector<std::vector<size_t>> groups;
  for (auto& [row, ranks] : by_row) groups.push_back(std::move(ranks));
  std::sort(groups.begin(), groups.end(),
            [](const auto& a, const auto& b) { return a.size() != b.size() ? a.size() > b.size() : a < b; });
  const bool majority = groups[0].size() > groups[1].size();
  std::string text;
  for (size_t i = 1; i < groups.size(); ++i) {
    text += (text.empty() ? "" : "; ") + names_of(all, groups[i]) +
            (majority ? " from the others" : " from " + names_of(all, groups[0])) + " in " +
            difference(all, groups[0][0], groups[i][0]);
  }
  return text;
}

}  // namespace

void check_replicas(const torch::nn::Module& module, Rank& rank) {
  if (rank.world_size() == 1) return;
  const std::string text = differences(hashes_of_all(module, rank));
  if (text.empty()) return;
  throw Error(rank.name() + ": check_replicas: the ranks' networks are no longer equal: " + text +
              ". Load weights before the DataParallel is made, or on all ranks; call step() on all ranks, after each " +
              "backward(); and if that is so, suspect the memory of the device");
}

}  // namespace lockstep
