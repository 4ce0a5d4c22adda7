#include <lockstep/data_parallel/check_replicas.hpp>

#include "optim/optimizer_state.hpp"
#include "ranks/gather.hpp"
#include "ranks/rank_place.hpp"
#include "ranks/trained_parameters.hpp"
#include "replica.hpp"
#include "replica_check.hpp"
#include "running_statistics_names.hpp"
#include "tensor_hash.hpp"
#include "trained_net.hpp"

#include <algorithm>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace lockstep {
namespace {

// Holds the hashes that the ranks computed, one row per rank, and the tensors' names.
struct Hashes {
  std::vector<std::string> ranks;
  std::vector<std::string> tensors;
  std::vector<std::vector<int64_t>> rows;
  std::vector<size_t> changed;  // ranks whose tensors have changed since they were noted
};

Hashes hashes_of_all(const io::NamedTensors& replica, Rank& rank, const std::vector<int64_t>& noted) {
  const auto& place = comm::RankPlace::of(rank);
  const auto count = static_cast<int64_t>(replica.size());
  const std::vector<int64_t> hashes = hashes_of(replica);
  const bool changed = noted.size() > hashes.size() || !std::equal(noted.begin(), noted.end(), hashes.begin());
  const at::Tensor of_ranks = of_all_ranks(rank, {place.world_rank, count, changed});
  Hashes all;
  for (int other = 0; other < rank.world_size(); ++other) {
    all.ranks.push_back(comm::name_of(static_cast<int>(of_ranks[other][0].item<int64_t>()), place.run->devices));
    if (of_ranks[other][2].item<int64_t>() != 0) all.changed.push_back(static_cast<size_t>(other));
    const auto theirs = of_ranks[other][1].item<int64_t>();
    if (theirs == count) continue;
    throw Error(rank.name() + ": check_replicas: the ranks' networks differ: there are " + std::to_string(count) +
                    " parameters and buffers, and " + std::to_string(theirs) + " on " + all.ranks.back() +
                    " (each state of an optimizer that is compared counts too)",
                {Error::difference, {rank.index(), other}});
  }
  for (const auto& [name, tensor] : replica) all.tensors.push_back(name);
  const at::Tensor table = of_all_ranks(rank, hashes).contiguous();
  const auto* cells = table.const_data_ptr<int64_t>();
  for (int other = 0; other < rank.world_size(); ++other)
    all.rows.emplace_back(cells + other * count, cells + (other + 1) * count);
  return all;
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

// Groups ranks with equal replicas, the largest group first.
std::vector<std::vector<size_t>> ranks_by_replica(const Hashes& all) {
  std::map<std::vector<int64_t>, std::vector<size_t>> by_row;
  for (size_t rank = 0; rank < all.rows.size(); ++rank) by_row[all.rows[rank]].push_back(rank);
  std::vector<std::vector<size_t>> groups;
  for (auto& [row, ranks] : by_row) groups.push_back(std::move(ranks));
  std::sort(groups.begin(), groups.end(),
            [](const auto& a, const auto& b) { return a.size() != b.size() ? a.size() > b.size() : a < b; });
  return groups;
}

std::string differences(const Hashes& all, const std::vector<std::vector<size_t>>& groups, bool majority) {
  std::string text;
  for (size_t i = 1; i < groups.size(); ++i) {
    text += (text.empty() ? "" : "; ") + joined_names(groups[i], all.ranks) +
            (majority ? " from the others" : " from " + joined_names(groups[0], all.ranks)) + " in " +
            difference(all, groups[0][0], groups[i][0]);
  }
  return text;
}

}  // namespace

io::NamedTensors replica_of(const torch::nn::Module& module, const torch::optim::Optimizer* optimizer) {
  io::NamedTensors tensors;
  for (const auto& item : module.named_parameters()) tensors.emplace_back(item.key(), item.value());
  if (optimizer != nullptr) {
    for (auto& [name, tensor] : optimizer_state(*optimizer, parameters_of(module)))
      tensors.emplace_back("the optimizer's " + name, std::move(tensor));
  }
  for (const auto& item : module.named_buffers()) {
    if (!is_running_statistic(item.key())) tensors.emplace_back(item.key(), item.value());
  }
  return tensors;
}

io::NamedTensors running_statistics_of(const torch::nn::Module& module) {
  io::NamedTensors tensors;
  for (const auto& item : module.named_buffers()) {
    if (is_running_statistic(item.key())) tensors.emplace_back(item.key(), item.value());
  }
  return tensors;
}

std::vector<int64_t> hashes_of(const io::NamedTensors& tensors) {
  std::vector<int64_t> hashes;
  for (const auto& [name, tensor] : tensors) hashes.push_back(tensor_hash(tensor));
  return hashes;
}

void compare_replicas(const io::NamedTensors& replica, Rank& rank, const std::vector<int64_t>& noted) {
  if (rank.world_size() == 1) return;
  const Hashes all = hashes_of_all(replica, rank, noted);
  const auto groups = ranks_by_replica(all);
  if (groups.size() == 1) return;
  const bool majority = groups[0].size() > groups[1].size();
  std::vector<int> wrong;
  for (size_t i = 1; majority && i < groups.size(); ++i) wrong.insert(wrong.end(), groups[i].begin(), groups[i].end());
  std::string text = differences(all, groups, majority);
  if (!majority && !all.changed.empty() && all.changed.size() < all.rows.size()) {
    wrong.assign(all.changed.begin(), all.changed.end());
    text += ". Between two updates, when nothing writes there, the memory of " + joined_names(all.changed, all.ranks) +
            " has changed";
  }
  const std::string& mixed = comm::RankPlace::of(rank).run->mixed_processors;
  const std::string rounds = mixed.empty() ? ""
                                           : ". That is to be expected of another kind of processor: " + mixed +
                                                 ", and the same update rounds otherwise there";
  throw ReplicasDiffer(rank.name() + ": check_replicas: the ranks' networks are no longer equal: " + text + rounds +
                           ". Load weights before the DataParallel is made, or on all ranks; call step() on all " +
                           "ranks, after each backward(); and if that is so, suspect the memory of the device" +
                           (mixed.empty() ? "" : ", once all processors are of one kind"),
                       wrong);
}

void compare_in_groups(const std::function<void()>& compare, Rank& world) {
  std::string mine;
  try {
    compare();
  } catch (const ReplicasDiffer& difference) {
    mine = difference.what();
  }
  if (!world.any(!mine.empty())) return;
  for (const auto& text : texts_of_all_ranks(mine, world)) {
    if (!text.empty()) throw ReplicasDiffer(mine.empty() ? text : mine, {});
  }
}

void compare_replicas(TrainedNet& net, const torch::optim::Optimizer* optimizer) {
  Replica& replica = *net.replica();
  const Whole whole(net.replica());
  io::NamedTensors tensors = replica_of(replica.module(), replica.sharded() ? nullptr : optimizer);
  if (replica.backwards().was_by_grains()) {
    for (auto& statistic : running_statistics_of(replica.module())) tensors.push_back(std::move(statistic));
  }
  std::function<void()> compare = [&] { compare_replicas(tensors, replica.rank()); };
  for (Rank* const group : net.other_parts()) compare = [compare, group] { compare_in_groups(compare, *group); };
  compare();
}

void check_replicas(TrainedNet& net) {
  compare_replicas(net, nullptr);
}

void check_replicas(const torch::nn::Module& module, Rank& rank) {
  compare_replicas(replica_of(module), rank);
}

// ---- What one rank alone has.

WatchedTensor watched(const std::string& name, const at::Tensor& tensor) {
  return {.name = name, .values = tensor, .version = static_cast<int64_t>(tensor._version())};
}

void MemoryWatch::note(const std::vector<WatchedTensor>& tensors) {
  forget();
  has_notes_ = true;
  for (const auto& tensor : tensors) notes_[tensor.name] = {tensor_hash(tensor.values), tensor.version};
}

void MemoryWatch::forget() {
  has_notes_ = false;
  notes_.clear();
}

std::string MemoryWatch::what_has_changed(const std::vector<WatchedTensor>& tensors) const {
  std::string first;
  size_t more = 0;
  for (const auto& tensor : tensors) {
    const auto note = notes_.find(tensor.name);
    if (note == notes_.end() || note->second.version != tensor.version) continue;
    if (note->second.hash == tensor_hash(tensor.values)) continue;
    first.empty() ? void(first = tensor.name) : void(++more);
  }
  return first + (more == 0 ? "" : " and " + std::to_string(more) + " more");
}

void MemoryWatch::check(const std::vector<WatchedTensor>& tensors, Rank& rank) const {
  const std::string mine = what_has_changed(tensors);
  if (!rank.any(!mine.empty())) return;
  const auto all = texts_of_all_ranks(mine, rank);
  const auto& place = comm::RankPlace::of(rank);
  std::vector<int> wrong;
  std::string text;
  for (int other = 0; other < rank.world_size(); ++other) {
    if (all[static_cast<size_t>(other)].empty()) continue;
    wrong.push_back(other);
    text += (text.empty() ? "" : ", and of ") + comm::name_of(other, place.run->devices) + " in " +
            all[static_cast<size_t>(other)];
  }
  if (wrong.size() == all.size()) wrong.clear();
  throw ReplicasDiffer(rank.name() +
                           ": check_replicas: between two updates, when nothing writes there, the memory of " + text +
                           " has changed. Suspect that device's memory; checkpoints from before are right",
                       wrong);
}

}  // namespace lockstep
