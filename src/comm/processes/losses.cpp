#include "losses.hpp"

#include "comm/meeting/stored.hpp"

#include <algorithm>
#include <utility>

namespace lockstep::comm {
namespace {

const std::string kBound = "bound";
const std::string kFree = "free";
const std::string kLost = "lost: ";

std::string standing_key(int process) {
  return "standing/" + std::to_string(process);
}

std::vector<uint8_t> standing_bytes(const std::string& text) {
  return {text.begin(), text.end()};
}

// What it is afterwards. A process that has not begun has no standing, and gets none.
std::string change_standing(c10d::Store& store, int process, const std::string& from, const std::string& to) {
  const auto now = store.compareSet(standing_key(process), standing_bytes(from), standing_bytes(to));
  return {now.begin(), now.end()};
}

std::string reason_in(const std::string& standing) {
  return standing.starts_with(kLost) ? standing.substr(kLost.size()) : "";
}

std::string standing_of(c10d::Store& store, int process) {
  return store.check({standing_key(process)}) ? store.get_to_str(standing_key(process)) : "";
}

std::string out_text(const std::string& why) {
  return "the others have gone on without this process, which they took for gone: " + why;
}

}  // namespace

bool declare_lost(c10d::Store& store, int process, const std::string& why) {
  if (reason_in(change_standing(store, process, kFree, kLost + why)).empty()) return false;
  add_to_count(store, "losses", 1);  // also if another one declared it: that one may not have come to this
  return true;
}

bool is_lost(c10d::Store& store, int process) {
  return !reason_in(standing_of(store, process)).empty();
}

Losses::Losses(StorePtr store, Layout layout, int process, bool allowed)
    : store_(std::move(store)), layout_(std::move(layout)), process_(process), allowed_(allowed) {}

void Losses::begin() {
  if (allowed_) store_->set(standing_key(process_), standing_bytes(kBound));
}

void Losses::release(int rank) {
  if (!allowed_) return;
  const std::lock_guard lock(changing_);
  released_.insert(rank);
  if (static_cast<int64_t>(released_.size()) < layout_.ranks_of(process_).size()) return;
  change_standing(*store_, process_, kBound, kFree);
}

std::string Losses::bind(int rank) {
  if (!allowed_) return "";
  const std::lock_guard lock(changing_);
  released_.erase(rank);
  return note_own(reason_in(change_standing(*store_, process_, kFree, kBound)));
}

std::string Losses::note_own(const std::string& why) {
  if (why.empty()) return "";
  const std::lock_guard lock(mutex_);
  lost_.emplace(process_, why);
  return out_text(why);
}

bool Losses::declare(int process, const std::string& why) {
  return allowed_ && declare_lost(*store_, process, why);
}

bool Losses::learn() {
  if (!allowed_) return false;
  const int64_t count = stored_count(*store_, "losses");
  if (count == std::exchange(seen_, count)) return false;
  for (int process = 0; process < layout_.processes(); ++process) {
    const std::string why = reason_in(standing_of(*store_, process));
    if (why.empty()) continue;
    const std::lock_guard lock(mutex_);
    lost_.emplace(process, why);
  }
  return true;
}

std::string Losses::speak_up() {
  return allowed_ ? note_own(reason_in(change_standing(*store_, process_, kFree, kBound))) : "";
}

std::string Losses::why_out() const {
  const std::lock_guard lock(mutex_);
  const auto found = lost_.find(process_);
  return found == lost_.end() ? "" : out_text(found->second);
}

std::string Losses::why(int rank) const {
  const std::lock_guard lock(mutex_);
  if (lost_.empty()) return "";
  const auto found = lost_.find(layout_.process_of(rank));
  return found == lost_.end() ? "" : found->second;
}

std::string Losses::why_in_vain(const OpenCall& call) const {
  if (call.is_message()) return why(call.peer);
  if (call.number < 0 || processes() == 0) return "";
  for (int rank = 0; rank < static_cast<int>(layout_.devices().size()); ++rank) {
    if (!call.concerns(rank) || why(rank).empty()) continue;
    return why(rank) +
           ". The run has gone on without it, but such a call needs all of its ranks. After a loss they can call "
           "ParameterServer::train, and nothing else together";
  }
  return "";
}

int Losses::processes() const {
  const std::lock_guard lock(mutex_);
  return static_cast<int>(lost_.size());
}

bool Losses::is_lost(int process) const {
  const std::lock_guard lock(mutex_);
  return lost_.contains(process);
}

size_t Losses::ranks(const std::vector<int>& among) const {
  if (processes() == 0) return 0;
  return std::count_if(among.begin(), among.end(), [&](int rank) { return !why(rank).empty(); });
}

void Losses::keep(const c10::intrusive_ptr<c10d::Work>& work) {
  const std::lock_guard lock(mutex_);
  kept_.push_back(work);
}

}  // namespace lockstep::comm
