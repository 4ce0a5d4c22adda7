#include "rank_state.hpp"

#include <lockstep/base/error.hpp>
#include <nlohmann/json.hpp>

#include <algorithm>

namespace lockstep::comm {

using nlohmann::json;
using Kind = RankState::Kind;

std::string OpenCall::where() const {
  if (!message.empty()) return text + " (" + message + ")";
  return number < 0 ? text : text + " (collective call " + std::to_string(number) + among.text() + ")";
}

bool OpenCall::concerns(int other) const {
  return among.ranks.empty() || std::binary_search(among.ranks.begin(), among.ranks.end(), other);
}

std::string RankState::to_text() const {
  if (kind == Kind::busy) return "";
  json state{{"calls", calls.to_text()}};
  if (kind == Kind::waits) {
    state["call"] = {{"number", call.number},     {"group", call.among.name}, {"members", call.among.ranks},
                     {"text", call.text},         {"peer", call.peer},        {"sends", call.sends},
                     {"messages", call.messages}, {"message", call.message},  {"content", call.content},
                     {"polled", call.polled}};
  }
  return state.dump();
}

RankState RankState::from_text(const std::string& text, size_t world_size) {
  RankState state;
  if (text.empty()) return state;
  const auto object = json::parse(text);
  state.calls = Calls::from_text(object.at("calls"), world_size);
  state.kind = object.contains("call") ? Kind::waits : Kind::returned;
  if (state.kind == Kind::returned) return state;
  const json& call = object["call"];
  call.at("number").get_to(state.call.number);
  call.at("group").get_to(state.call.among.name);
  call.at("members").get_to(state.call.among.ranks);
  call.at("text").get_to(state.call.text);
  call.at("peer").get_to(state.call.peer);
  call.at("sends").get_to(state.call.sends);
  call.at("messages").get_to(state.call.messages);
  call.at("message").get_to(state.call.message);
  call.at("content").get_to(state.call.content);
  call.at("polled").get_to(state.call.polled);
  if (state.call.peer >= static_cast<int>(world_size)) throw Error("a peer that is none");
  return state;
}

namespace {

std::string contradiction_of_collective(const OpenCall& call, const std::vector<RankState>& states,
                                        const Layout& layout) {
  for (int other = 0; other < static_cast<int>(states.size()); ++other) {
    if (!call.concerns(other)) continue;
    const RankState& state = states[other];
    const CollectiveCalls& calls = state.calls.of(call.among.name);
    if (state.kind == Kind::lost) {
      return layout.name(call.rank) + " waits in " + call.where() + " for " + layout.name(other) +
             ", whose process was lost. After a loss the ranks can call ParameterServer::train together, and nothing "
             "else";
    }
    if (state.kind == Kind::returned && calls.count <= call.number) {
      return layout.name(other) + " returned without the call that " + layout.name(call.rank) +
             " waits for: " + call.where() + ". All ranks must make the same calls";
    }
    const std::string theirs = calls.text_of(call.number);
    if (!theirs.empty() && theirs != call.text) {
      return "the ranks' calls differ at collective call " + std::to_string(call.number) + call.among.text() + ": " +
             layout.name(call.rank) + " called " + call.text + ", " + layout.name(other) + " called " + theirs +
             ". All ranks must make the same calls in the same order";
    }
  }
  return "";
}

std::string contradiction_of_message(const OpenCall& call, const RankState& peer, const Layout& layout) {
  const std::string name = layout.name(call.rank), other = layout.name(call.peer);
  if (peer.kind == Kind::returned) {
    const int64_t answers = (call.sends ? peer.calls.received : peer.calls.sent)[call.rank];
    if (answers >= call.messages) return "";
    return other + " returned without the " + (call.sends ? "recv" : "send") + " that " + name +
           " waits for: " + call.where() + ". Each send needs a recv";
  }
  if (peer.kind == Kind::waits && peer.call.message == call.message && peer.call.content != call.content) {
    return "the two sides of " + call.message + " differ: " + name + " called " + call.text + ", " + other +
           " called " + peer.call.text;
  }
  return "";
}

}  // namespace

std::string contradiction(const OpenCall& call, const std::vector<RankState>& states, const Layout& layout) {
  if (call.is_message()) return contradiction_of_message(call, states[call.peer], layout);
  return call.number < 0 ? "" : contradiction_of_collective(call, states, layout);
}

namespace {

// Whether `rank` waits for a call that `other`, which waits too, has not made yet.
bool lacks(const std::vector<RankState>& states, int rank, int other) {
  const OpenCall& call = states[rank].call;
  const Calls& theirs = states[other].calls;
  if (!call.is_message()) {
    return other != rank && call.concerns(other) && theirs.of(call.among.name).count <= call.number;
  }
  return other == call.peer && (call.sends ? theirs.received : theirs.sent)[rank] < call.messages;
}

}  // namespace

std::string standstill(const std::vector<RankState>& states, const Layout& layout) {
  const int ranks = static_cast<int>(states.size());
  std::vector<int> waits_for(ranks, -1);  // by rank: one that it lacks and that is stuck too
  std::vector<bool> stuck;
  for (const auto& state : states) {
    const OpenCall& call = state.call;
    stuck.push_back(state.kind == Kind::waits && !call.polled && (call.is_message() || call.number >= 0));
  }
  for (bool changed = true; changed;) {  // whoever lacks nobody that is stuck will go on
    changed = false;
    for (int rank = 0; rank < ranks; ++rank) {
      if (!stuck[rank]) continue;
      int other = 0;
      while (other < ranks && !(stuck[other] && lacks(states, rank, other))) ++other;
      waits_for[rank] = other;
      if (other < ranks) continue;
      stuck[rank] = false;
      changed = true;
    }
  }
  int rank = 0;
  while (rank < ranks && !stuck[rank]) ++rank;
  if (rank == ranks) return "";
  for (int step = 0; step < ranks; ++step) rank = waits_for[rank];  // by then it is on the circle
  std::string text;
  const int first = rank;
  do {
    text += (text.empty() ? "" : ", ") + layout.name(rank) + " waits in " + states[rank].call.where() + " for " +
            layout.name(waits_for[rank]);
    rank = waits_for[rank];
  } while (rank != first);
  return "the ranks wait for each other: " + text + ". All ranks must make the same calls in the same order";
}

std::string missing_ranks(const OpenCall& call, const std::vector<RankState>& states, const Layout& layout) {
  std::string text;
  for (int other = 0; other < static_cast<int>(states.size()); ++other) {
    const RankState& state = states[other];
    if (call.is_message() ? other != call.peer : other == call.rank || !call.concerns(other)) continue;
    if (state.kind == Kind::waits && state.call.number == call.number && state.call.message == call.message &&
        state.call.among.name == call.among.name) {
      continue;
    }
    text += (text.empty() ? "" : " and ") + layout.name(other);
    switch (state.kind) {
      case Kind::waits:
        text += ", which waits in " + state.call.where();
        break;
      case Kind::returned:
        text += ", which has returned";
        break;
      case Kind::lost:
        text += ", whose process was lost";
        break;
      case Kind::busy:
        text += ", which is not there";
    }
  }
  return text;
}

}  // namespace lockstep::comm
