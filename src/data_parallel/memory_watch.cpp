#include "memory_watch.hpp"

#include "ranks/gather.hpp"
#include "ranks/rank_place.hpp"
#include "replica_check.hpp"
#include "tensor_hash.hpp"

namespace lockstep {

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
