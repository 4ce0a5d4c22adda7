#include "calls.hpp"

#include <lockstep/base/error.hpp>
#include <nlohmann/json.hpp>

#include "comm/arguments.hpp"
#include "comm/texts.hpp"

#include <algorithm>
#include <functional>

namespace lockstep::comm {

// This makes functions that turn the fields into JSON and back. A count of complete calls is not told.
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(CollectiveCalls, count, recent, fingerprint)

namespace {

constexpr size_t kRecent = 8;

using CallsByRank = std::vector<std::pair<int, const CollectiveCalls*>>;  // the calls of one group, by rank

std::string differing(const CallsByRank& members, const Roster& roster) {
  const auto& [first_rank, first] = members[0];
  for (const auto& [rank, calls] : members) {
    if (calls->fingerprint == first->fingerprint) continue;
    const std::string name = roster.name(rank), other = roster.name(first_rank);
    return std::string(kCallsDiffer) + ": " + name + " and " + other + " made " + std::to_string(calls->count) +
           " collective calls each, but not the same ones; those that differ never came about. The last was " +
           calls->last() + " on " + name + " and " + first->last() + " on " + other + kSameCallsInOrder;
  }
  return "";
}

std::string unanswered_collective(const CallsByRank& members, const Roster& roster) {
  const auto& [most_rank, most] = *std::max_element(
      members.begin(), members.end(), [](const auto& a, const auto& b) { return a.second->count < b.second->count; });
  std::string missing;
  for (const auto& [rank, calls] : members) {
    if (calls->count == most->count) continue;
    missing += (missing.empty() ? "" : " and ") + roster.name(rank);
  }
  if (missing.empty()) return differing(members, roster);
  return text_of_unanswered_call(roster.name(most_rank), most->last() + text_of_number(most->count - 1, ""), missing);
}

std::string times(int64_t count) {
  return count == 1 ? "once" : std::to_string(count) + " times";
}

}  // namespace

std::string text_of_number(int64_t number, const std::string& group) {
  return " (collective call " + std::to_string(number) + (group.empty() ? ")" : " of a group)");
}

void CollectiveCalls::add(const std::string& text) {
  ++count;
  if (recent.size() == kRecent) recent.erase(recent.begin());
  recent.push_back(text);
  fingerprint = fingerprint * 31 + std::hash<std::string>()(text);
}

std::string CollectiveCalls::text_of(int64_t number) const {
  const int64_t index = number - (count - static_cast<int64_t>(recent.size()));
  return index < 0 || number >= count ? "" : recent[index];
}

const CollectiveCalls& Calls::of(const std::string& group) const {
  static const CollectiveCalls none;
  const auto found = collective.find(group);
  return found == collective.end() ? none : found->second;
}

std::string Calls::to_text() const {
  return nlohmann::json{{"collective", collective}, {"sent", sent}, {"received", received}, {"last", last}}.dump();
}

Calls Calls::from_text(const std::string& text, size_t world_size) {
  const auto json = nlohmann::json::parse(text);
  Calls calls;
  json.at("collective").get_to(calls.collective);
  json.at("sent").get_to(calls.sent);
  json.at("received").get_to(calls.received);
  json.at("last").get_to(calls.last);
  if (calls.sent.size() != world_size || calls.received.size() != world_size) {
    throw Error("calls of a world of another size");
  }
  return calls;
}

std::string unanswered(const std::vector<Calls>& by_rank, const Roster& roster) {
  for (size_t from = 0; from < by_rank.size(); ++from) {
    for (size_t to = 0; to < by_rank.size(); ++to) {
      const int64_t sent = by_rank[from].sent[to], received = by_rank[to].received[from];
      if (sent == received) continue;
      const std::string sender = roster.name(static_cast<int>(from)), receiver = roster.name(static_cast<int>(to));
      return sender + " called send to " + receiver + " " + times(sent) + ", which called recv from " + sender + " " +
             times(received) + "; what was not waited for never came about, for want of " +
             (sent > received ? receiver : sender) + kSameCalls;
    }
  }
  std::map<std::string, CallsByRank> groups;
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    for (const auto& [group, calls] : by_rank[rank].collective) {
      groups[group].emplace_back(static_cast<int>(rank), &calls);
    }
  }
  for (const auto& [group, members] : groups) {
    if (auto complaint = unanswered_collective(members, roster); !complaint.empty()) return complaint;
  }
  return "";
}

CallLog::CallLog(const Range& ranks, size_t world_size) {
  for (int64_t rank = ranks.begin; rank < ranks.end; ++rank) by_rank_.emplace(static_cast<int>(rank), world_size);
}

void CallLog::join(int rank, const std::string& group) {
  const std::lock_guard lock(mutex_);
  by_rank_.at(rank).collective[group];
}

int64_t CallLog::add_collective(int rank, const std::string& group, const std::string& text) {
  const std::lock_guard lock(mutex_);
  Calls& calls = by_rank_.at(rank);
  CollectiveCalls& of_group = calls.collective[group];
  of_group.add(text);
  calls.last = text + text_of_number(of_group.count - 1, group);
  return of_group.count - 1;
}

std::optional<int> CallLog::changes(int rank, const std::string& group, int64_t number, const at::Tensor& memory) {
  const std::lock_guard lock(mutex_);
  auto& by_rank = changed_[{group, number}];
  for (const auto& [other, theirs] : by_rank) {
    if (share_memory(memory, theirs)) return other;
  }
  by_rank.emplace(rank, memory);
  return {};
}

void CallLog::complete(int rank, const std::string& group, int64_t number) {
  const std::lock_guard lock(mutex_);
  int64_t& complete = by_rank_.at(rank).collective[group].complete;
  complete = std::max(complete, number + 1);
  int64_t least = complete;
  for (const auto& [other, calls] : by_rank_) {
    if (calls.collective.contains(group)) least = std::min(least, calls.of(group).complete);
  }
  // A broadcast can be complete on its root before another rank of this process has posted.
  changed_.erase(changed_.lower_bound({group, 0}), changed_.lower_bound({group, least}));
}

int64_t CallLog::add_message(int rank, int peer, bool sends) {
  const std::lock_guard lock(mutex_);
  Calls& calls = by_rank_.at(rank);
  const int64_t count = ++(sends ? calls.sent : calls.received)[peer];
  calls.last = (sends ? "send " : "recv ") + std::to_string(count) + (sends ? " to rank " : " from rank ") +
               std::to_string(peer);
  return count;
}

Calls CallLog::of(int rank) const {
  const std::lock_guard lock(mutex_);
  return by_rank_.at(rank);
}

}  // namespace lockstep::comm
