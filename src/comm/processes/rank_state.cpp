#include "rank_state.hpp"

#include <lockstep/base/error.hpp>
#include <nlohmann/json.hpp>

#include <algorithm>

namespace lockstep::comm {

using nlohmann::json;
using Kind = RankState::Kind;

std::string OpenCall::place() const {
  return message.empty() ? "collective call " + std::to_string(number) + among.text() : message;
}

std::string OpenCall::where() const {
  return message.empty() && number < 0 ? text : text + " (" + place() + ")";
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

}  // namespace lockstep::comm
