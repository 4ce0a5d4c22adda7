#include "comm/calls.hpp"

#include <nlohmann/json.hpp>

#include <functional>

namespace lockstep::comm {
namespace {

constexpr size_t kRecent = 8;
constexpr const char* kAdvice = ". All ranks must make the same calls";

std::string differing(const std::vector<Calls>& by_rank, const Layout& layout) {
  for (size_t rank = 1; rank < by_rank.size(); ++rank) {
    const Calls &mine = by_rank[rank], &first = by_rank[0];
    if (mine.fingerprint == first.fingerprint) continue;
    const std::string name = layout.name(static_cast<int>(rank)), other = layout.name(0);
    return "the ranks' calls differ: " + name + " and " + other + " made " + std::to_string(mine.collective) +
           " collective calls each, but not the same ones; those that differ never came about. The last was " +
           mine.last() + " on " + name + " and " + first.last() + " on " + other + kAdvice + " in the same order";
  }
  return "";
}

std::string unanswered_collective(const std::vector<Calls>& by_rank, const Layout& layout) {
  size_t most = 0;
  for (size_t rank = 1; rank < by_rank.size(); ++rank) {
    if (by_rank[rank].collective > by_rank[most].collective) most = rank;
  }
  std::string missing;
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    if (by_rank[rank].collective == by_rank[most].collective) continue;
    missing += (missing.empty() ? "" : " and ") + layout.name(static_cast<int>(rank));
  }
  if (missing.empty()) return differing(by_rank, layout);
  return layout.name(static_cast<int>(most)) + " called " + by_rank[most].last() + " (collective call " +
         std::to_string(by_rank[most].collective - 1) + ") and did not wait for it; it never came about, for want of " +
         missing + kAdvice;
}

std::string times(int64_t count) {
  return count == 1 ? "once" : std::to_string(count) + " times";
}

}  // namespace

void Calls::add(const std::string& text) {
  ++collective;
  if (recent.size() == kRecent) recent.erase(recent.begin());
  recent.push_back(text);
  fingerprint = fingerprint * 31 + std::hash<std::string>()(text);
}

std::string Calls::text_of(int64_t number) const {
  const int64_t index = number - (collective - static_cast<int64_t>(recent.size()));
  return index < 0 || number >= collective ? "" : recent[index];
}

std::string Calls::to_text() const {
  return nlohmann::json{{"collective", collective},
                        {"recent", recent},
                        {"fingerprint", fingerprint},
                        {"sent", sent},
                        {"received", received}}
      .dump();
}

Calls Calls::from_text(const std::string& text) {
  const auto json = nlohmann::json::parse(text);
  Calls calls;
  calls.collective = json.at("collective").get<int64_t>();
  calls.recent = json.at("recent").get<std::vector<std::string>>();
  calls.fingerprint = json.at("fingerprint").get<uint64_t>();
  calls.sent = json.at("sent").get<std::vector<int64_t>>();
  calls.received = json.at("received").get<std::vector<int64_t>>();
  return calls;
}

std::string unanswered(const std::vector<Calls>& by_rank, const Layout& layout) {
  for (size_t from = 0; from < by_rank.size(); ++from) {
    for (size_t to = 0; to < by_rank.size(); ++to) {
      const int64_t sent = by_rank[from].sent[to], received = by_rank[to].received[from];
      if (sent == received) continue;
      const std::string sender = layout.name(static_cast<int>(from)), receiver = layout.name(static_cast<int>(to));
      return sender + " called send to " + receiver + " " + times(sent) + ", which called recv from " + sender + " " +
             times(received) + "; what was not waited for never came about, for want of " +
             (sent > received ? receiver : sender) + kAdvice;
    }
  }
  return unanswered_collective(by_rank, layout);
}

}  // namespace lockstep::comm
