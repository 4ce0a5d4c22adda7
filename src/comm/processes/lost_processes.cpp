#include "lost_processes.hpp"

#include "comm/meeting/stored.hpp"

#include <algorithm>
#include <utility>

namespace lockstep::comm {
namespace {

std::string out_text(const std::string& why) {
  return "the others have gone on without this process, which they took for gone: " + why;
}

}  // namespace

LostProcesses::LostProcesses(StorePtr store, Roster roster, int process, bool allowed)
    : store_(std::move(store)), roster_(std::move(roster)), process_(process), allowed_(allowed) {}

void LostProcesses::begin() {
  if (allowed_) begin_status(*store_, process_);
}

void LostProcesses::allow_loss(int rank) {
  if (!allowed_) return;
  const std::lock_guard lock(changing_);
  if (has_spoken_) return;
  dispensable_.insert(rank);
  if (static_cast<int64_t>(dispensable_.size()) < roster_.ranks_of(process_).size()) return;
  change_status(*store_, process_, kNeeded, kDispensable);
}

std::string LostProcesses::forbid_loss(int rank) {
  if (!allowed_) return "";
  const std::lock_guard lock(changing_);
  dispensable_.erase(rank);
  return note_own(reason_in(change_status(*store_, process_, kDispensable, kNeeded)));
}

std::string LostProcesses::note_own(const std::string& why) {
  if (why.empty()) return "";
  const std::lock_guard lock(mutex_);
  lost_.emplace(process_, why);
  return out_text(why);
}

bool LostProcesses::declare(int process, const std::string& why) {
  return allowed_ && declare_lost(*store_, process, why);
}

bool LostProcesses::refresh() {
  if (!allowed_) return false;
  const int64_t count = stored_count(*store_, "lost_count");
  if (count == std::exchange(seen_, count)) return false;
  for (int process = 0; process < roster_.processes(); ++process) {
    const std::string why = reason_in(status_of(*store_, process));
    if (why.empty()) continue;
    const std::lock_guard lock(mutex_);
    lost_.emplace(process, why);
  }
  return true;
}

std::string LostProcesses::forbid_loss() {
  if (!allowed_) return "";
  const std::lock_guard lock(changing_);
  has_spoken_ = true;
  return note_own(reason_in(change_status(*store_, process_, kDispensable, kNeeded)));
}

std::string LostProcesses::own_reason() const {
  const std::lock_guard lock(mutex_);
  const auto found = lost_.find(process_);
  return found == lost_.end() ? "" : out_text(found->second);
}

std::string LostProcesses::reason_of(int rank) const {
  const std::lock_guard lock(mutex_);
  if (lost_.empty()) return "";
  const auto found = lost_.find(roster_.process_of(rank));
  return found == lost_.end() ? "" : found->second;
}

std::string LostProcesses::reason_to_give_up(const OpenCall& call) const {
  if (call.is_message()) return reason_of(call.peer);
  if (call.number < 0 || count() == 0) return "";
  for (int rank = 0; rank < static_cast<int>(roster_.devices().size()); ++rank) {
    if (!call.concerns(rank) || reason_of(rank).empty()) continue;
    return reason_of(rank) +
           ". The run has gone on without it, but such a call needs all of its ranks. After a loss they can call "
           "ParameterServer::train, and nothing else together";
  }
  return "";
}

int LostProcesses::count() const {
  const std::lock_guard lock(mutex_);
  return static_cast<int>(lost_.size());
}

bool LostProcesses::is_lost(int process) const {
  const std::lock_guard lock(mutex_);
  return lost_.contains(process);
}

size_t LostProcesses::count_among(const std::vector<int>& ranks) const {
  if (count() == 0) return 0;
  return std::count_if(ranks.begin(), ranks.end(), [&](int rank) { return !reason_of(rank).empty(); });
}

void LostProcesses::keep_buffers(const c10::intrusive_ptr<c10d::Work>& work) {
  const std::lock_guard lock(mutex_);
  kept_.push_back(work);
}

}  // namespace lockstep::comm
