#include "vigil.hpp"

#include <lockstep/base/error.hpp>

#include "base/exception_text.hpp"
#include "base/seconds.hpp"
#include "comm/meeting/stored.hpp"
#include "comm/peer_lost.hpp"

#include <algorithm>
#include <charconv>
#include <system_error>
#include <utility>

namespace lockstep::comm {
namespace {

using namespace std::chrono_literals;

constexpr auto kBeat = 100ms;
// Without a sign of life, until a process counts as dead, if that is shorter than Options::silence.
constexpr auto kSilenceWhenClosed = 1200ms;    // once a connection was closed
constexpr auto kSilenceOfConnecting = 1500ms;  // of one that one connects to: Gloo does not tell if it is gone
constexpr auto kStop = 1s;                     // from a request to stop until waits end in which nothing happens
constexpr auto kStandstill = 2s;               // between two beats: this process stood still (Ctrl-Z), others maybe too
constexpr int kFewProcesses = 16;  // more than these look around less often, or the store would have too much to say
constexpr auto kSearch = 4s;       // for whoever closed a connection

std::vector<uint8_t> bytes(const std::string& text) {
  return {text.begin(), text.end()};
}

}  // namespace

Vigil::Vigil(StorePtr store, Layout layout, int process, Options options)
    : store_(std::move(store)),
      layout_(std::move(layout)),
      process_(process),
      patience_(std::min<std::chrono::milliseconds>(1s, options.timeout / 4)),
      options_(std::move(options)),
      log_(layout_.ranks_of(process), layout_.devices().size()),
      losses_(store_, layout_, process, options_.keep_going),
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
  std::fill(seen_.begin(), seen_.end(), Clock::now());
  store_->set("beat/" + std::to_string(process_), bytes(own_beat()));
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
    } catch (const ForeignValue& error) {
      report(error.what());
    } catch (const std::exception&) {
      lose_store();
    }
    if (!failure().empty() && !std::exchange(told, true)) on_failure_();
  }
}

std::string Vigil::own_beat() {
  const auto [moves, on_its_own] = [&] {
    const std::lock_guard lock(mutex_);
    std::set<int> others_turn = returned_;
    for (const auto& [id, wait] : open_) {
      if (!wait.call.polled) others_turn.insert(wait.call.rank);
    }
    return std::pair(moves_, static_cast<int64_t>(others_turn.size()) < layout_.ranks_of(process_).size());
  }();
  return std::to_string(++own_beats_) + " " + std::to_string(activity_.count(moves, on_its_own));
}

void Vigil::beat() {
  const auto now = Clock::now();
  if (now - std::exchange(last_beat_, now) > kStandstill) std::fill(seen_.begin(), seen_.end(), now);
  store_->set("beat/" + std::to_string(process_), bytes(own_beat()));
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
  const bool connects =
      std::any_of(open_.begin(), open_.end(), [](const auto& wait) { return wait.second.call.connects; });
  // NCCL's waits do not pass through here.
  return !open.empty() || connects || suspicions_ > 0 || finishing_ || options_.stop.stop_requested() ||
         !layout_.devices()[0].is_cpu();
}

void Vigil::look_around() {
  std::map<uint64_t, Open> open;
  const bool look = must_look_around(open);
  publish(open);
  if (!look) {
    std::fill(beats_.begin(), beats_.end(), Beat{});  // the next look starts anew
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
  watch_hearts();
  end_waits_of_a_stop(states);
}

// What this process's ranks have waited in for long, one call each: the one that the rank stands in, or else the oldest
// that it polls.
void Vigil::publish(const std::map<uint64_t, Open>& open) {
  std::map<int, std::string> now;
  for (const bool polled : {false, true}) {
    for (const auto& [id, wait] : open) {
      if (wait.call.polled != polled) continue;
      const int rank = wait.call.rank;
      now.emplace(rank, RankState{RankState::Kind::waits, log_.of(rank), wait.call}.to_text());
    }
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

Vigil::Clock::duration Vigil::patience_with_silence() const {
  const std::lock_guard lock(mutex_);
  if (suspicions_ > 0) return std::min<Clock::duration>(kSilenceWhenClosed, options_.silence);
  for (const auto& [id, wait] : open_) {
    if (wait.call.connects) return std::min<Clock::duration>(kSilenceOfConnecting, options_.silence);
  }
  return options_.silence;
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
  const size_t world_size = layout_.devices().size();
  for (const auto& text : read_all("state/", static_cast<int>(world_size))) {
    const std::string key = "state/" + std::to_string(states.size());
    states.push_back(parse_stored(key, text, [&](const auto& it) { return RankState::from_text(it, world_size); }));
  }
  for (size_t rank = 0; rank < states.size(); ++rank) {  // what a lost one said last does not count
    if (!losses_.why(static_cast<int>(rank)).empty()) states[rank] = {.kind = RankState::Kind::lost};
  }
  return states;
}

std::vector<Vigil::Beat> Vigil::beats() {
  std::vector<Beat> beats;
  for (const auto& text : read_all("beat/", layout_.processes())) {
    const auto parse = [](const std::string& it) {
      Beat beat;
      const char* const end = it.data() + it.size();
      const auto [space, error] = std::from_chars(it.data(), end, beat.count);
      if (error != std::errc() || space == end || *space != ' ' || beat.count <= 0) throw Error("no count");
      const auto [rest, another] = std::from_chars(space + 1, end, beat.activity);
      if (another != std::errc() || rest != end || beat.activity < 0) throw Error("no count");
      return beat;
    };
    beats.push_back(text.empty() ? Beat{} : parse_stored("beat/" + std::to_string(beats.size()), text, parse));
  }
  return beats;
}

// A rank that does something will soon learn of the stop from the others, or has learned it and writes a checkpoint.
void Vigil::end_waits_of_a_stop(const std::vector<RankState>& states) {
  if (!options_.stop.stop_requested() || !layout_.devices()[0].is_cpu() || !failure().empty()) return;
  const auto now = Clock::now();
  if (stop_asked_ == Clock::time_point()) stop_asked_ = now;
  if (now - std::max(stop_asked_, active_) < kStop) return;
  const std::string text = [&]() -> std::string {
    const std::lock_guard lock(mutex_);
    for (const auto& [id, wait] : open_) {
      if (wait.call.polled || now - wait.since < kStop) continue;
      const std::string missing = missing_ranks(wait.call, states, layout_);
      return layout_.name(wait.call.rank) + " waited in " + wait.call.where() +
             (missing.empty() ? "" : " for " + missing) + ": stopped by request";
    }
    return finishing_
               ? "the ranks of " + layout_.name_process(process_) + " had returned, others had not: stopped by request"
               : "";
  }();
  if (!text.empty()) report(text);
}

void Vigil::watch_hearts() {
  const auto limit = patience_with_silence();
  const auto beats = this->beats();
  for (int process = 0; process < layout_.processes(); ++process) {
    if (beats[process].count != beats_[process].count) seen_[process] = Clock::now();
    if (beats[process].activity != beats_[process].activity || beats_[process].count == 0) active_ = Clock::now();
    beats_[process] = beats[process];
    const auto silence = Clock::now() - seen_[process];
    if (process == process_ || silence < (beats[process].count == 0 ? options_.silence : limit)) continue;
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
  set_failure(options_.host + " is gone: the store that it keeps does not answer");
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
    if (const auto out = losses_.speak_up(); !out.empty()) return set_failure(out);
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
  ++vigil_.moves_;
  vigil_.open_.emplace(id_, Open{std::move(call), since_, std::move(interrupt)});
}

Vigil::Waiting::~Waiting() {
  const std::lock_guard lock(vigil_.mutex_);
  ++vigil_.moves_;
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
  note_where(call);
  throw Error(first.starts_with(name) ? first : name + ": " + call.where() + " was ended: " + first);
}

void Vigil::stepped(int64_t steps) {
  steps_ = steps;
}

void Vigil::note_where(const OpenCall& call) {
  const Calls calls = log_.of(call.rank);
  const CollectiveCalls& of_group = calls.of(call.among.name);
  const int64_t last = of_group.complete - 1;
  std::string text = layout_.name(call.rank) + " was in " + call.where() + "; ";
  if (last < 0) {
    text += "no collective call" + call.among.text() + " was complete yet";
  } else {
    const std::string name = of_group.text_of(last);
    text += "the last complete one was collective call " + std::to_string(last) + call.among.text() +
            (name.empty() ? "" : ", " + name);
  }
  if (steps_ > 0) text += "; the last complete step was step " + std::to_string(steps_);
  const std::lock_guard lock(mutex_);
  if (where_.empty()) where_ = text;
}

std::string Vigil::missing(const OpenCall& call) {
  std::string text;
  try {
    std::this_thread::sleep_for(2 * kBeat);  // until the others have said what they wait in
    text = missing_ranks(call, states(), layout_);
  } catch (const ForeignValue& error) {
    text = error.what();
  } catch (const std::exception&) {
    text = options_.host + ", whose store does not answer";
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
      by_rank.push_back(parse_stored("calls/" + std::to_string(rank), texts[rank],
                                     [&](const auto& text) { return Calls::from_text(text, texts.size()); }));
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
      add_to_count(*store_, "done", 1);
    }
    while (failure().empty() && stored_count(*store_, "done") + losses_.processes() < layout_.processes()) {
      std::unique_lock lock(mutex_);
      changed_.wait_for(lock, 10ms, [&] { return !failure_.empty(); });
    }
    if (failure().empty()) check_calls();
  } catch (const ForeignValue& error) {
    report(error.what());
  } catch (const std::exception&) {
    lose_store();
  }
  return last_words();
}

// Of a death also where a rank was that survived it, in all processes the same one.
std::string Vigil::last_words() {
  const std::string first = failure();
  if (!first.starts_with("the process of ")) return first;
  std::string where = [&] {
    const std::lock_guard lock(mutex_);
    return where_.empty() ? "the process of " + layout_.name_process(process_) + " was in no call" : where_;
  }();
  try {
    if (!lost_) where = store_->compareSet("where", std::string(), where);
  } catch (const std::exception&) {
    lost_ = true;
  }
  return first + ". " + where;
}

}  // namespace lockstep::comm
