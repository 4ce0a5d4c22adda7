#include "comm/rank_state.hpp"

#include <nlohmann/json.hpp>

namespace lockstep::comm {

using nlohmann::json;
using Kind = RankState::Kind;

std::string OpenCall::where() const {
  if (!message.empty()) return text + " (" + message + ")";
  return number < 0 ? text : text + " (collective call " + std::to_string(number) + ")";
}

std::string RankState::to_text() const {
  switch (kind) {
    case Kind::busy:
      break;
    case Kind::returned:
      return json{{"returned", calls.to_text()}}.dump();
    case Kind::waits:
      return json{{"number", call.number},  {"text", call.text},         {"peer", call.peer},
                  {"sends", call.sends},    {"messages", call.messages}, {"message", call.message},
                  {"content", call.content}}
          .dump();
  }
  return "";
}

RankState RankState::from_text(const std::string& text) {
  RankState state;
  if (text.empty()) return state;
  const auto object = json::parse(text);
  if (object.contains("returned")) {
    state.kind = Kind::returned;
    state.calls = Calls::from_text(object["returned"]);
    return state;
  }
  state.kind = Kind::waits;
  object.at("number").get_to(state.call.number);
  object.at("text").get_to(state.call.text);
  object.at("peer").get_to(state.call.peer);
  object.at("sends").get_to(state.call.sends);
  object.at("messages").get_to(state.call.messages);
  object.at("message").get_to(state.call.message);
  object.at("content").get_to(state.call.content);
  return state;
}

namespace {

std::string contradiction_of_collective(const OpenCall& call, const std::vector<RankState>& states,
                                        const Layout& layout) {
  for (int other = 0; other < static_cast<int>(states.size()); ++other) {
    const RankState& state = states[other];
    if (state.kind == Kind::returned && state.calls.collective <= call.number) {
      return layout.name(other) + " returned without the call that " + layout.name(call.rank) +
             " waits for: " + call.where() + ". All ranks must make the same calls";
    }
    if (state.kind == Kind::waits && state.call.number == call.number && state.call.text != call.text) {
      return "the ranks' calls differ at collective call " + std::to_string(call.number) + ": " +
             layout.name(call.rank) + " called " + call.text + ", " + layout.name(other) + " called " +
             state.call.text + ". All ranks must make the same calls in the same order";
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
  if (call.peer >= 0) return contradiction_of_message(call, states[call.peer], layout);
  return call.number < 0 ? "" : contradiction_of_collective(call, states, layout);
}

std::string missing_ranks(const OpenCall& call, const std::vector<RankState>& states, const Layout& layout) {
  std::string text;
  for (int other = 0; other < static_cast<int>(states.size()); ++other) {
    const RankState& state = states[other];
    if (call.peer >= 0 ? other != call.peer : other == call.rank) continue;
    if (state.kind == Kind::waits && state.call.number == call.number && state.call.message == call.message) continue;
    text += (text.empty() ? "" : " and ") + layout.name(other);
    switch (state.kind) {
      case Kind::waits:
        text += ", which waits in " + state.call.where();
        break;
      case Kind::returned:
        text += ", which has returned";
        break;
      case Kind::busy:
        text += ", which has not made this call";
    }
  }
  return text;
}

}  // namespace lockstep::comm
