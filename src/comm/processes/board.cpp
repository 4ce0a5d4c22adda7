#include "board.hpp"

#include <lockstep/base/error.hpp>
#include <nlohmann/json.hpp>

#include "comm/meeting/stored.hpp"

#include <exception>
#include <utility>

namespace lockstep::comm {
namespace {

std::string beat_key(int process) {
  return "beat/" + std::to_string(process);
}

std::string state_key(int rank) {
  return "state/" + std::to_string(rank);
}

std::string calls_key(int rank) {
  return "calls/" + std::to_string(rank);
}

const std::string kEndedWell = "ended well";  // a failure's text begins with the name of a rank or a process

Failure failure_in(const std::string& stored) {
  return stored == kEndedWell ? Failure() : failure_from(stored);
}

std::string to_text(const Heartbeat& beat) {
  return nlohmann::json{beat.count, beat.silence.count()}.dump();
}

Heartbeat heartbeat_from(const std::string& text) {
  const auto [count, silence] = nlohmann::json::parse(text).get<std::pair<int64_t, int64_t>>();
  if (count < 1 || silence < 0) throw Error("no heartbeat");
  return {count, std::chrono::milliseconds(silence)};
}

}  // namespace

Board::Board(StorePtr store, Roster roster, int process, std::string host)
    : store_(std::move(store)), roster_(std::move(roster)), process_(process), host_(std::move(host)) {}

void Board::begin(const Heartbeat& first) {
  put_heartbeat(first);
  const Range ranks = roster_.ranks_of(process_);
  for (int64_t rank = ranks.begin; rank < ranks.end; ++rank) {  // leaves all keys, so that one request reads all states
    put_state(static_cast<int>(rank), RankState().to_text());
  }
}

// A process that has met the others may not have begun yet; then its values are "".
std::vector<std::string> Board::read_all(const std::string& prefix, int count) {
  std::vector<std::string> keys, values;
  for (int index = 0; index < count; ++index) keys.push_back(prefix + std::to_string(index));
  if (!store_->check(keys)) {  // then multiGet would wait
    for (const auto& key : keys) values.push_back(store_->check({key}) ? store_->get_to_str(key) : "");
    return values;
  }
  for (const auto& value : store_->multiGet(keys)) values.emplace_back(value.begin(), value.end());
  return values;
}

void Board::put_heartbeat(const Heartbeat& beat) {
  store_->set(beat_key(process_), to_text(beat));
}

std::vector<Heartbeat> Board::heartbeats() {
  std::vector<Heartbeat> beats;
  for (const auto& text : read_all("beat/", roster_.processes())) {
    const std::string key = beat_key(static_cast<int>(beats.size()));
    beats.push_back(text.empty() ? Heartbeat{} : parse_stored(key, text, heartbeat_from));
  }
  return beats;
}

void Board::put_state(int rank, const std::string& text) {
  store_->set(state_key(rank), text);
}

std::vector<RankState> Board::states() {
  std::vector<RankState> states;
  const size_t world_size = roster_.devices().size();
  for (const auto& text : read_all("state/", static_cast<int>(world_size))) {
    states.push_back(parse_stored(state_key(static_cast<int>(states.size())), text,
                                  [&](const auto& it) { return RankState::from_text(it, world_size); }));
  }
  return states;
}

void Board::put_calls(int rank, const Calls& calls) {
  store_->set(calls_key(rank), calls.to_text());
}

std::vector<Calls> Board::calls() {
  std::vector<Calls> calls;
  const size_t world_size = roster_.devices().size();
  for (const auto& text : read_all("calls/", static_cast<int>(world_size))) {
    calls.push_back(parse_stored(calls_key(static_cast<int>(calls.size())), text,
                                 [&](const auto& it) { return Calls::from_text(it, world_size); }));
  }
  return calls;
}

void Board::put_come(const std::string& place) {
  add_to_count(*store_, place, 1);
}

bool Board::all_come(const std::string& place) {
  return stored_count(*store_, place) >= roster_.processes();
}

Failure Board::failure() {
  return store_->check({"failure"}) ? failure_in(store_->get_to_str("failure")) : Failure();
}

Failure Board::agreed_end() {
  return failure_in(first_of("failure", kEndedWell));
}

std::string Board::first_of(const std::string& key, const std::string& text) {
  return store_->compareSet(key, std::string(), text);
}

std::string Board::agreed(const std::string& key, const std::string& text) {
  if (store_is_lost_) return text;
  try {
    return first_of(key, text);
  } catch (const std::exception&) {
    store_is_lost_ = true;
    return text;
  }
}

Failure Board::agreed_failure(const Failure& failure) {
  return failure_in(agreed("failure", to_stored(failure)));
}

std::string Board::agreed_where(const std::string& text) {
  return agreed("where", text);
}

Failure Board::lose_store() {
  store_is_lost_ = true;
  return {host_ + " is gone: the store that it keeps does not answer", {Error::death}};
}

}  // namespace lockstep::comm
