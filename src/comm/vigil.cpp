#include "comm/vigil.hpp"

#include <lockstep/error.hpp>

#include "comm/peer_lost.hpp"
#include "comm/seconds.hpp"
#include "exception_text.hpp"

#include <algorithm>
#include <utility>

namespace lockstep::comm {
namespace {

using namespace std::chrono_literals;

constexpr auto kBeat = 100ms;
constexpr auto kSilence = 6s;                // without a sign of life, until a process counts as dead
constexpr auto kSilenceWhenClosed = 1200ms;  // the same once a connection was closed
constexpr int kFewProcesses = 16;  // more than these look around less often, or the store would have too much to say
constexpr auto kSearch = 4s;       // for whoever closed a connection

std::vector<uint8_t> bytes(const std::string& text) {
  return {text.begin(), text.end()};
}

}  // namespace

Vigil::Vigil(StorePtr store, Layout layout, int process, std::chrono::milliseconds timeout, std::string host,
             bool keep_going)
    : store_(std::move(store)),
      layout_(std::move(layout)),
      process_(process),
      patience_(std::min<std::chrono::milliseconds>(1s, timeout / 4)),
      host_(std::move(host)),
      log_(layout_.ranks_of(process), layout_.devices().size()),
      losses_(store_, layout_, process, keep_going),
      beats_(layout_.processes()),
      seen_(layout_.processes()) {}

Vigil::~Vigil() {
  stop();
}

void Vigil::stop() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void Vigil::start(std::function<void()> on_failure) {
  on_failure_ = std::move(on_failure);
  losses_.begin();
  store_->add("beat/" + std::to_string(process_), 1);
  const Part ranks = layout_.ranks_of(process_);
  for (int64_t rank = ranks.begin; rank < ranks.end; ++rank) {  // so that one request reads all
    published_[static_cast<int>(rank)] = "";
    store_->set("state/" + std::to_string(rank), bytes(""));
  }
  thread_ = std::thread([this] { run(); });
}

// ---- The vigil's thread.

void Vigil::run() {
  bool told = false;
  for (;;) {
    {
      std::unique_lock lock(mutex_);
      changed_.wait_for(lock, kBeat, [&] { return stop_ || (!failure_.empty() && !told); });
      if (stop_) return;
    }
    try {
      if (!lost_) beat();
    } catch (const std::exception&) {
      lose_store();
    }
    if (!failure().empty() && !std::exchange(told, true)) on_failure_();
  }
}

void Vigil::beat() {
  store_->add("beat/" + std::to_string(process_), 1);
  if (!failure().empty()) return;
  if (store_->check({"failure"})) return set_failure(store_->get_to_str("failure"));
  if (losses_.learn()) {
    if (const auto out = losses_.why_out(); !out.empty()) return set_failure(out);
    const std::lock_guard lock(mutex_);
    interrupt_waits();
    changed_.notify_all();
  }
  look_around();
}

bool Vigil::must_look_around(std::map<uint64_t, Open>& open) {
  const std::lock_guard lock(mutex_);
  for (const auto& [id, wait] : open_) {
    if (Clock::now() - wait.since > patience_) open.emplace(id, wait);
  }
  // NCCL's waits do not pass through here.
  return !open.empty() || suspicions_ > 0 || finishing_ || !layout_.devices()[0].is_cpu();
}

void Vigil::look_around() {
  std::map<uint64_t, Open> open;
  const bool look = must_look_around(open);
  publish(open);
  if (!look) {
    std::fill(beats_.begin(), beats_.end(), "");  // the next look starts anew
    return;
  }
  if (Clock::now() < next_look_) return;
  next_look_ = Clock::now() + kBeat * (layout_.processes() / kFewProcesses);
  const auto states = this->states();
  for (const auto& [id, wait] : open) {
    const auto complaint = contradiction(wait.call, states, layout_);
    if (!complaint.empty()) return report(complaint);
  }
  if (const auto complaint = standstill(states, layout_); !complaint.empty()) return report(complaint);
  const bool suspicious = [&] {
    const std::lock_guard lock(mutex_);
    return suspicions_ > 0;
  }();
  watch_hearts(suspicious);
}

// What this process's ranks have waited in for long, one call each: the oldest.
void Vigil::publish(const std::map<uint64_t, Open>& open) {
  std::map<int, std::string> now;
  for (const auto& [id, wait] : open) {
    const int rank = wait.call.rank;
    now.emplace(rank, RankState{RankState::Kind::waits, log_.of(rank), wait.call}.to_text());
  }
  {
    const std::lock_guard lock(mutex_);
    for (const int rank : returned_) now.emplace(rank, RankState{RankState::Kind::returned, log_.of(rank)}.to_text());
  }
  for (const auto& [rank, text] : published_) now.emplace(rank, "");
  for (const auto& [rank, text] : now) {
    auto& before = published_[rank];
    if (before == text) continue;
    store_->set("state/" + std::to_string(rank), bytes(text));
    before = text;
  }
}

// What is not there yet, because its process has met the others but not begun its vigil, is "".
std::vector<std::string> Vigil::read_all(const std::string& what, int count) {
  std::vector<std::string> keys, values;
  for (int index = 0; index < count; ++index) keys.push_back(what + std::to_string(index));
  if (!store_->check(keys)) {  // a read would wait
    for (const auto& key : keys) values.push_back(store_->check({key}) ? store_->get_to_str(key) : "");
    return values;
  }
  for (const auto& value : store_->multiGet(keys)) values.emplace_back(value.begin(), value.end());
  return values;
}

std::vector<RankState> Vigil::states() {
  std::vector<RankState> states;
  for (const auto& text : read_all("state/", static_cast<int>(layout_.devices().size()))) {
    states.push_back(RankState::from_text(text));
  }
  for (size_t rank = 0; rank < states.size(); ++rank) {  // what a lost one said last does not count
    if (!losses_.why(static_cast<int>(rank)).empty()) states[rank] = {.kind = RankState::Kind::lost};
  }
  return states;
}

void Vigil::watch_hearts(bool suspicious) {
  const auto beats = read_all("beat/", layout_.processes());
  for (int process = 0; process < layout_.processes(); ++process) {
    if (beats[process] != beats_[process]) seen_[process] = Clock::now();
    beats_[process] = beats[process];
    const auto silence = Clock::now() - seen_[process];
    if (process == process_ || silence < (suspicious ? Clock::duration(kSilenceWhenClosed) : kSilence)) continue;
    if (losses_.is_lost(process)) continue;
    const std::string text = "the process of " + layout_.name_process(process) +
                             " is gone: it ended without a word (killed, or it crashed), or it stands still";
    if (!losses_.declare(process, text)) return report(text);
  }
}

// ---- From any thread.

void Vigil::set_failure(const std::string& text) {
  {
    const std::lock_guard lock(mutex_);
    if (failure_.empty()) failure_ = text;
    interrupt_waits();
  }
  changed_.notify_all();
}

void Vigil::interrupt_waits() {
  for (const auto& [id, open] : open_) {
    if (open.interrupt) open.interrupt();
  }
}

void Vigil::lose_store() {
  lost_ = true;
  set_failure(host_ + " is gone: the store that it keeps does not answer");
}

std::string Vigil::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

void Vigil::report(const std::string& text) {
  std::string first = text;
  if (store_is_lost()) return set_failure(text);
  try {
    // What one says that was taken for gone concerns nobody any more.
    if (const auto out = losses_.ask_whether_out(); !out.empty()) return set_failure(out);
    const auto won = store_->compareSet("failure", bytes(""), bytes(text));
    first.assign(won.begin(), won.end());
  } catch (const std::exception&) {
    lost_ = true;  // what this process saw is all that is known
  }
  set_failure(first);
}

void Vigil::returned(int rank) {
  const std::lock_guard lock(mutex_);
  returned_.insert(rank);
}

void Vigil::release(int rank) {
  try {
    losses_.release(rank);
  } catch (const std::exception&) {
    lose_store();
  }
}

void Vigil::bind(int rank) {
  try {
    if (const auto out = losses_.bind(rank); !out.empty()) set_failure(out);
  } catch (const std::exception&) {
    lose_store();
  }
  if (const auto text = failure(); !text.empty()) throw Error(layout_.name(rank) + ": " + text);
}

Vigil::Waiting::Waiting(Vigil& vigil, OpenCall call, std::function<void()> interrupt)
    : vigil_(vigil), since_(Clock::now()) {
  const std::lock_guard lock(vigil_.mutex_);
  id_ = vigil_.next_id_++;
  vigil_.open_.emplace(id_, Open{std::move(call), since_, std::move(interrupt)});
}

Vigil::Waiting::~Waiting() {
  const std::lock_guard lock(vigil_.mutex_);
  vigil_.open_.erase(id_);
}

void Vigil::explain(const Waiting& waiting, const OpenCall& call, const std::exception_ptr& cause,
                    std::chrono::milliseconds timeout) {
  const auto name = layout_.name(call.rank);
  const auto settled = [&] { return !failure().empty() || !losses_.why_in_vain(call).empty(); };
  if (!settled() && Clock::now() - waiting.since() >= timeout) {
    report(name + " waited " + seconds(timeout) + " in " + call.where() + " for " + missing(call) +
           ". If that is no error, raise the timeout (RunOptions::timeout)");
  }
  if (!settled()) {  // a connection was closed, and soon the store says why
    std::unique_lock lock(mutex_);
    ++suspicions_;
    changed_.wait_for(lock, kSearch, [&] { return !failure_.empty() || !losses_.why_in_vain(call).empty(); });
    --suspicions_;
  }
  if (const auto loss = losses_.why_in_vain(call); failure().empty() && !loss.empty()) {
    const std::string text = name + ": " + call.where() + ": " + loss;
    if (call.is_message()) throw PeerLost(text);
    report(text);
  }
  if (failure().empty()) report(name + ": " + call.where() + " failed: " + exception_text(cause));
  const std::string first = failure();
  throw Error(first.starts_with(name) ? first : name + ": " + call.where() + " was ended: " + first);
}

std::string Vigil::missing(const OpenCall& call) {
  std::string text;
  try {
    std::this_thread::sleep_for(2 * kBeat);  // until the others have said what they wait in
    text = missing_ranks(call, states(), layout_);
  } catch (const std::exception&) {
    text = host_ + ", whose store does not answer";
  }
  return text.empty() ? "its data" : text;
}

void Vigil::leave_calls() {
  const auto ranks = [&] {
    const std::lock_guard lock(mutex_);
    return returned_;
  }();
  for (const int rank : ranks) store_->set("calls/" + std::to_string(rank), bytes(log_.of(rank).to_text()));
}

// All processes find the same.
void Vigil::check_calls() {
  if (!layout_.devices()[0].is_cpu()) return;
  const auto texts = read_all("calls/", static_cast<int>(layout_.devices().size()));
  std::vector<Calls> by_rank;
  std::set<int> lost;
  for (int rank = 0; rank < static_cast<int>(texts.size()); ++rank) {
    if (losses_.why(rank).empty()) {
      by_rank.push_back(Calls::from_text(texts[rank]));
    } else {
      by_rank.emplace_back(texts.size());
      lost.insert(rank);
    }
  }
  if (const auto complaint = unanswered(by_rank, layout_, lost); !complaint.empty()) report(complaint);
}

std::string Vigil::finish() {
  {
    const std::lock_guard lock(mutex_);
    finishing_ = true;
  }
  try {
    if (failure().empty()) {
      leave_calls();
      store_->add("done", 1);
    }
    while (failure().empty() && store_->add("done", 0) + losses_.processes() < layout_.processes()) {
      std::unique_lock lock(mutex_);
      changed_.wait_for(lock, 10ms, [&] { return !failure_.empty(); });
    }
    if (failure().empty()) check_calls();
  } catch (const std::exception&) {
    lose_store();
  }
  return failure();
}

}  // namespace lockstep::comm
