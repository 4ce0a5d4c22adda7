#include "watchdog.hpp"

#include <c10/util/Exception.h>

#include "base/exception_text.hpp"
#include "base/start_thread.hpp"
#include "blame.hpp"
#include "comm/meeting/stored.hpp"
#include "io/process_stat.hpp"

#include <algorithm>
#include <ctime>
#include <exception>
#include <filesystem>
#include <system_error>
#include <utility>

namespace lockstep::comm {
namespace {

using namespace std::chrono_literals;

// A process may be silent for so long in these cases, if its own limit is not shorter.
constexpr auto kSilenceWhenClosed = 1200ms;    // once a connection was closed
constexpr auto kSilenceOfConnecting = 1500ms;  // while a rank connects (Gloo does not tell if the other side is gone)
constexpr auto kStop = 1s;                     // waits end so long after a request to stop if nothing happens
constexpr auto kStandstill = 2s;               // if so long passes between two beats, this process stood still (Ctrl-Z)
constexpr int kFewProcesses = 16;              // more than these look around less often, or the store would be too busy

constexpr auto kBetweenLooksAtThreads = 250ms;
constexpr int kLeastPart = 20;  // computing counts above 1/20 of the time, since a process that only waits takes less

bool any_connects(const std::vector<Waits::Wait>& waits) {
  return std::any_of(waits.begin(), waits.end(), [](const auto& wait) { return wait.call.connects; });
}

std::chrono::nanoseconds time_of(clockid_t clock) {
  timespec time{};
  clock_gettime(clock, &time);
  return std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
}

// Linux shows state D while a thread waits for a disk, or for a file system on the network.
bool a_thread_waits_for_a_disk() {
  std::error_code error;
  for (const auto& thread : std::filesystem::directory_iterator("/proc/self/task", error)) {
    if (io::stat_after_name(thread.path()).starts_with('D')) return true;
  }
  return false;
}

}  // namespace

int64_t Activity::count(int64_t moves, bool on_its_own) {
  if (moves != std::exchange(moves_, moves)) ++count_;
  const auto now = Clock::now();
  if (now - looked_ < kBetweenLooksAtThreads) return count_;
  const Time computed = time_of(CLOCK_PROCESS_CPUTIME_ID) - time_of(CLOCK_THREAD_CPUTIME_ID);
  const auto part = (now - std::exchange(looked_, now)) / kLeastPart;
  const bool computes = computed - std::exchange(computed_, computed) > part;
  if (on_its_own && (computes || a_thread_waits_for_a_disk())) ++count_;
  return count_;
}

Watchdog::Watchdog(Board& board, Waits& waits, const CallLog& log, const Roster& roster, int process, Options options)
    : board_(board),
      waits_(waits),
      log_(log),
      roster_(roster),
      process_(process),
      options_(std::move(options)),
      own_limit_(options_.silence),
      beats_(roster.processes()),
      seen_(roster.processes()) {}

Watchdog::~Watchdog() {
  stop();
}

void Watchdog::stop() {
  stop_ = true;
  waits_.wake();
  if (thread_.joinable()) thread_.join();
}

void Watchdog::start(std::function<void()> on_failure, std::function<Failure()> look) {
  on_failure_ = std::move(on_failure);
  look_ = std::move(look);
  std::fill(seen_.begin(), seen_.end(), Clock::now());
  const Range ranks = roster_.ranks_of(process_);
  for (int64_t rank = ranks.begin; rank < ranks.end; ++rank) published_[static_cast<int>(rank)] = "";
  board_.begin(next_heartbeat());
  thread_ = start_thread([this] { run(); });
}

void Watchdog::run() {
  bool told = false;
  for (;;) {
    waits_.sleep(kBeat, [&](bool failed) { return stop_ || (failed && !told); });
    if (stop_) return;
    try {
      if (!board_.store_is_lost()) beat();
    } catch (const ForeignValue& error) {
      report(error);
    } catch (const c10::DistError&) {
      waits_.fail(board_.lose_store());
    } catch (const std::exception&) {
      report({"watching over the other processes failed in that of " + roster_.name_process(process_) + ": " +
                  exception_text(std::current_exception()),
              data_of(std::current_exception())});
    }
    if (waits_.failure().empty() || std::exchange(told, true)) continue;
    on_failure_();
    if (!roster_.devices()[0].is_cpu()) put_calls();
  }
}

// Says what this process's ranks called. A rank that waits for its device cannot do that.
void Watchdog::put_calls() {
  try {
    for (const auto& [rank, state] : published_) board_.put_calls(rank, log_.of(rank));
  } catch (const std::exception&) {  // the run has failed already, and the others wait for a moment only
  }
}

Heartbeat Watchdog::next_heartbeat() {
  const auto now = waits_.snapshot();
  std::set<int> others_turn = now.returned;
  for (const auto& wait : now.open) {
    if (!wait.call.polled) others_turn.insert(wait.call.rank);
  }
  const bool on_its_own = static_cast<int64_t>(others_turn.size()) < roster_.ranks_of(process_).size();
  return {++own_beats_, activity_.count(now.moves, on_its_own), own_limit_.limit()};
}

void Watchdog::beat() {
  const auto now = Clock::now();
  const auto since_last = now - std::exchange(last_beat_, now);
  const bool stood_still = since_last > kStandstill;
  // A watcher that was late itself accuses nobody, since others may have been later.
  if (since_last > std::min<Clock::duration>(kStandstill, own_limit_.limit() / 2)) {
    std::fill(seen_.begin(), seen_.end(), now);
  }
  own_limit_.beat(now);
  waits_.pass(stood_still ? Clock::duration(kBeat) : kStandstill);
  board_.put_heartbeat(next_heartbeat());
  if (!waits_.failure().empty()) return;
  if (const auto failure = board_.failure(); !failure.empty()) return waits_.fail(failure);
  if (const auto found = look_ ? look_() : Failure(); !found.empty()) return report(found);
  look_around();
}

void Watchdog::look_around() {
  auto now = waits_.snapshot();
  const bool connects = any_connects(now.open);
  auto& waits = now.open;
  waits.erase(std::remove_if(waits.begin(), waits.end(),
                             [&](const auto& wait) { return wait.waited <= options_.long_wait && !wait.is_late(); }),
              waits.end());
  publish(waits, now.returned);
  const bool has_reason = !waits.empty() || connects || now.searching || now.finishing ||
                          options_.stop.stop_requested() || !roster_.devices()[0].is_cpu();  // no NCCL waits are seen
  if (!has_reason) {
    std::fill(beats_.begin(), beats_.end(), Heartbeat{});  // the next look starts anew
    return;
  }
  if (Clock::now() < next_look_) return;
  next_look_ = Clock::now() + kBeat * (roster_.processes() / kFewProcesses);
  const auto states = board_.states();
  if (!roster_.devices()[0].is_cpu()) {  // calls on GPUs wait on the device, so none is among the waits
    const Range ranks = roster_.ranks_of(process_);
    for (int64_t rank = ranks.begin; rank < ranks.end; ++rank) {
      const auto complaint = early_return(static_cast<int>(rank), log_.of(static_cast<int>(rank)), states, roster_);
      if (!complaint.empty()) return report(complaint);
    }
  }
  for (const auto& wait : waits) {
    const auto complaint = contradiction(wait.call, states, roster_);
    if (!complaint.empty()) return report(complaint);
  }
  if (const auto complaint = standstill(states, roster_); !complaint.empty())
    return report({complaint, {Error::difference}});
  for (const auto& wait : waits) {
    if (!wait.call.polled && wait.waited >= wait.timeout + kUntilSaid) {
      return report({text_of_lateness(wait.call, wait.timeout, states, roster_), {Error::late}});
    }
  }
  watch_hearts();
  end_waits_of_a_stop(states);
}

// Puts one call per rank on the board: the one that the rank waits in, or else the oldest that it polls.
void Watchdog::publish(const std::vector<Waits::Wait>& waits, const std::set<int>& returned) {
  std::map<int, std::string> now;
  for (const bool polled : {false, true}) {
    for (const auto& wait : waits) {
      if (wait.call.polled != polled) continue;
      const int rank = wait.call.rank;
      now.emplace(rank, RankState{RankState::Kind::waits, log_.of(rank), wait.call}.to_text());
    }
  }
  for (const int rank : returned) now.emplace(rank, RankState{RankState::Kind::returned, log_.of(rank)}.to_text());
  for (const auto& [rank, text] : published_) now.emplace(rank, RankState().to_text());
  for (const auto& [rank, text] : now) {
    auto& before = published_[rank];
    if (before == text) continue;
    board_.put_state(rank, text);
    before = text;
  }
}

// If one process beats late, others on its machine may be later.
Watchdog::Clock::duration Watchdog::silence_of_the_dead(const std::vector<Heartbeat>& beats) const {
  const auto most = options_.silence.most;
  auto silence = own_limit_.limit(), learned = std::chrono::milliseconds(kSilenceOfConnecting);
  for (int process = 0; process < roster_.processes(); ++process) {
    const auto told = beats[process].silence;
    silence = std::max(silence, told);
    if (told < most) learned = std::max(learned, told);  // told == most may mean that it knows nothing yet
  }
  const auto now = waits_.snapshot();
  if (now.searching) return std::min<Clock::duration>(kSilenceWhenClosed, silence);
  if (any_connects(now.open)) return std::min({learned, silence, most});
  // GPU ranks' hearts are always watched. CPU ranks' hearts are watched only once somebody has waited, which doubles
  // their time. So GPU ranks get twice the time too.
  if (!roster_.devices()[0].is_cpu()) silence *= 2;
  return std::min(silence, most);
}

void Watchdog::watch_hearts() {
  const auto beats = board_.heartbeats();
  const auto limit = silence_of_the_dead(beats);
  for (int process = 0; process < roster_.processes(); ++process) {
    const Heartbeat& beat = beats[process];
    const Heartbeat before = std::exchange(beats_[process], beat);
    if (beat.count != before.count) seen_[process] = Clock::now();
    if (beat.activity != before.activity || before.count == 0) active_ = Clock::now();
    const auto silence = Clock::now() - seen_[process];
    if (process == process_ || silence < (beat.count == 0 ? options_.silence.most : limit)) continue;
    return report({text_of_silence(process, roster_), {Error::death, roster_.list_of(process)}});
  }
}

// A rank that does something will soon learn of the stop from the others. Or the rank has learned of the stop and
// writes a checkpoint.
void Watchdog::end_waits_of_a_stop(const std::vector<RankState>& states) {
  if (!options_.stop.stop_requested() || !roster_.devices()[0].is_cpu() || !waits_.failure().empty()) return;
  const auto now = Clock::now();
  if (stop_asked_ == Clock::time_point()) stop_asked_ = now;
  if (now - std::max(stop_asked_, active_) < kStop) return;
  const auto present = waits_.snapshot();
  for (const auto& wait : present.open) {
    if (wait.call.polled || wait.waited < kStop) continue;
    return report({text_of_stop(wait.call, states, roster_), {Error::stopped}});
  }
  if (present.finishing) report({text_of_stop_at_the_end(process_, roster_), {Error::stopped}});
}

void Watchdog::report(const Failure& failure) {
  waits_.fail(board_.agreed_failure(failure));
}

}  // namespace lockstep::comm
