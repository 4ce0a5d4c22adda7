#include "board.hpp"

#include <lockstep/base/error.hpp>
#include <nlohmann/json.hpp>

#include "comm/meeting/stored.hpp"

#include <exception>
#include <tuple>
#include <utility>

namespace lockstep::comm {
namespace {

const std::string kEndedWell = "ended well";  // a failure's text begins with the name of a rank or a process

Failure failure_in(const std::string& stored) {
  return stored == kEndedWell ? Failure() : failure_from(stored);
}

std::string to_text(const Heartbeat& beat) {
  return nlohmann::json{beat.count, beat.activity, beat.silence.count()}.dump();
}

Heartbeat heartbeat_from(const std::string& text) {
  if (text.empty()) return {};
  const auto [count, activity, silence] = nlohmann::json::parse(text).get<std::tuple<int64_t, int64_t, int64_t>>();
  if (count < 1 || activity < 0 || silence < 0) throw Error("no heartbeat");
  return {count, activity, std::chrono::milliseconds(silence)};
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
template <class Parse>
auto Board::read_all(const std::string& prefix, size_t count, const Parse& parse) {
  std::vector<std::string> keys, texts;
  for (size_t index = 0; index < count; ++index) keys.push_back(prefix + std::to_string(index));
  if (store_->check(keys)) {  // else multiGet would wait
    for (const auto& value : store_->multiGet(keys)) texts.emplace_back(value.begin(), value.end());
  } else {
    for (const auto& key : keys) texts.push_back(store_->check({key}) ? store_->get_to_str(key) : "");
  }
  std::vector<decltype(parse(prefix))> values;
  for (size_t index = 0; index < count; ++index) values.push_back(parse_stored(keys[index], texts[index], parse));
  return values;
}

void Board::put_heartbeat(const Heartbeat& beat) {
  store_->set("beat/" + std::to_string(process_), to_text(beat));
}

std::vector<Heartbeat> Board::heartbeats() {
  return read_all("beat/", roster_.processes(), heartbeat_from);
}

void Board::put_state(int rank, const std::string& text) {
  store_->set("state/" + std::to_string(rank), text);
}

std::vector<RankState> Board::states() {
  const size_t world_size = roster_.devices().size();
  return read_all("state/", world_size, [&](const auto& text) { return RankState::from_text(text, world_size); });
}

void Board::put_calls(int rank, const Calls& calls) {
  store_->set("calls/" + std::to_string(rank), calls.to_text());
}

std::vector<Calls> Board::calls() {
  const size_t world_size = roster_.devices().size();
  return read_all("calls/", world_size, [&](const auto& text) { return Calls::from_text(text, world_size); });
}

std::vector<std::optional<Calls>> Board::known_calls() {
  const size_t world_size = roster_.devices().size();
  return read_all("calls/", world_size, [&](const auto& text) {
    return text.empty() ? std::nullopt : std::optional(Calls::from_text(text, world_size));
  });
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
