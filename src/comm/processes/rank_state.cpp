#include "rank_state.hpp"

#include <lockstep/base/error.hpp>
#include <nlohmann/json.hpp>

#include <algorithm>

namespace lockstep::comm {

using nlohmann::json;
using Kind = RankState::Kind;

// These make functions that turn the fields into JSON and back.
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Members, name, ranks)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(OpenCall, number, among, text, peer, sends, messages, message, content, polled)

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
  if (kind == Kind::waits) state["call"] = call;
  return state.dump();
}

RankState RankState::from_text(const std::string& text, size_t world_size) {
  RankState state;
  if (text.empty()) return state;
  const auto object = json::parse(text);
  state.calls = Calls::from_text(object.at("calls"), world_size);
  state.kind = object.contains("call") ? Kind::waits : Kind::returned;
  if (state.kind == Kind::waits) object["call"].get_to(state.call);
  if (state.call.peer >= static_cast<int>(world_size)) throw Error("a peer that is none");
  return state;
}

}  // namespace lockstep::comm
