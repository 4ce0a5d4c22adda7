#include "monitor.hpp"

#include <c10/util/Exception.h>
#include <lockstep/base/error.hpp>

#include "base/exception_text.hpp"
#include "blame.hpp"
#include "comm/meeting/stored.hpp"

#include <algorithm>
#include <thread>
#include <utility>

namespace lockstep::comm {
namespace {

using namespace std::chrono_literals;

constexpr auto kSearch = 4s;                 // the search for the process that closed a connection lasts so long
constexpr auto kUntilToldCalls = 500ms;      // the others' watchdogs have put their ranks' calls by then
constexpr auto kLongestPauseOfSearch = 5ms;  // the pause between two looks of a search; the watchdog looks less often

}  // namespace

Monitor::Monitor(StorePtr store, Roster roster, int process, const Options& options)
    : roster_(std::move(roster)),
      process_(process),
      log_(roster_.ranks_of(process), roster_.devices().size()),
      board_(std::move(store), roster_, process, options.host),
      watchdog_(board_, waits_, log_, roster_, process,
                {.long_wait = std::min<std::chrono::milliseconds>(1s, options.timeout / 4),
                 .silence = options.silence,
                 .stop = options.stop}) {}

void Monitor::start(std::function<void()> on_failure, std::function<Failure()> look) {
  try {
    watchdog_.start(std::move(on_failure), std::move(look));
  } catch (const Error& error) {  // the others have met this process, and wait for it
    const Failure failure(roster_.name_process(process_) + ": " + error.what(), error.data());
    report(failure);
    failure.raise();
  }
}

void Monitor::report(const Failure& failure) {
  waits_.fail(board_.agreed_failure(failure));
}

Monitor::Waiting::Waiting(Monitor& monitor, OpenCall call, std::chrono::milliseconds timeout,
                          std::function<void()> interrupt)
    : waits_(monitor.waits_), timeout_(timeout), id_(waits_.begin({std::move(call), timeout}, std::move(interrupt))) {}

Monitor::Waiting::~Waiting() {
  waits_.end(id_);
}

void Monitor::explain(const Waiting& waiting, const OpenCall& call, const std::exception_ptr& cause) {
  const auto name = roster_.name(call.rank);
  if (failure().empty() && waiting.is_late()) report_lateness(call, waiting.timeout());
  // A connection was closed, and the store will soon say why.
  {
    const Waits::Search search(waits_);
    const auto begin = Clock::now();
    for (const auto end = begin + kSearch; failure().empty() && Clock::now() < end;) {
      look_for_failure();
      if (!failure().empty()) break;
      waits_.sleep(pause_after(Clock::now() - begin, kLongestPauseOfSearch), [](bool failed) { return failed; });
    }
  }
  if (failure().empty()) report_own(call, cause);
  const auto [first, data] = failure();
  note_where(whereabouts(call, log_.of(call.rank), steps_, roster_));
  Failure(first.starts_with(name) ? first : name + ": " + call.where() + " was ended: " + first, data).raise();
}

void Monitor::report_own(const OpenCall& call, const std::exception_ptr& cause) {
  Error::Data data = data_of(cause);
  if (data.cause == Error::user_code) data.cause = Error::machine;  // no function of a user's runs in a call
  data.ranks = {call.rank};
  report({roster_.name(call.rank) + ": " + call.where() + " failed: " + exception_text(cause), std::move(data)});
}

void Monitor::look_for_failure() {
  try {
    waits_.fail(board_.failure());
  } catch (const c10::DistError&) {  // this comes before the search gives up, which would name nobody
    waits_.fail(board_.lose_store());
  } catch (const std::exception&) {  // the watchdog reports it
  }
}

void Monitor::report_lateness(const OpenCall& call, std::chrono::milliseconds timeout) {
  std::this_thread::sleep_for(Watchdog::kUntilSaid);
  with_store([&] { report({text_of_lateness(call, timeout, board_.states(), roster_), {Error::late}}); });
}

void Monitor::with_store(const std::function<void()>& work) {
  try {
    work();
  } catch (const ForeignValue& error) {
    report(error);
  } catch (const std::exception&) {
    waits_.fail(board_.lose_store());
  }
}

void Monitor::raise(int rank) {
  const auto [first, data] = failure();
  const auto name = roster_.name(rank);
  Failure(first.starts_with(name) ? first : name + ": " + first, data).raise();
}

void Monitor::note_where(const std::string& text) {
  const std::lock_guard lock(mutex_);
  if (where_.empty()) where_ = text;
}

// All processes find the same here.
void Monitor::check_calls() {
  if (const auto complaint = unanswered(board_.calls(), roster_); !complaint.empty())
    report({complaint, {Error::difference}});
}

Failure Monitor::finish(const std::function<void()>& complete) {
  waits_.note_finish();
  with_store([&] {
    if (failure().empty()) {
      for (const int rank : waits_.snapshot().returned) board_.put_calls(rank, log_.of(rank));
    }
    wait_for_all("done");
    if (failure().empty()) check_calls();
    if (failure().empty()) complete();
    if (roster_.devices()[0].is_cpu()) agree_on_end();
  });
  is_over_ = failure().empty();
  return last_words();
}

Failure Monitor::finish_taking_down() {
  with_store([&] {
    wait_for_all("closed");
    agree_on_end();
  });
  return last_words();
}

// Lets no later failure count. On GPUs call it after the communicators are taken down.
void Monitor::agree_on_end() {
  if (!failure().empty()) return;
  if (const auto first = board_.agreed_end(); !first.empty()) waits_.fail(first);
}

void Monitor::wait_for_all(const std::string& place) {
  if (failure().empty()) board_.put_come(place);
  while (failure().empty() && !board_.all_come(place)) waits_.sleep(10ms, [](bool failed) { return failed; });
}

// Lets all processes name the same place where a survivor's rank was when another process died, or over NCCL, whose
// waits nobody knows, the same last calls.
Failure Monitor::last_words() {
  const Failure first = failure();
  const bool on_gpus = !roster_.devices()[0].is_cpu();
  if (on_gpus && (first.is(Error::death) || first.is(Error::late) || first.is(Error::machine)))
    return {first.text + ". " + board_.agreed_where(last_calls(calls_of_the_living(first), steps_)), first.data};
  if (!first.is(Error::death)) return first;
  const std::string where = [&] {
    const std::lock_guard lock(mutex_);
    return where_.empty() ? "the process of " + roster_.name_process(process_) + " was in no call" : where_;
  }();
  return {first.text + ". " + board_.agreed_where(where), first.data};
}

// Waits a moment for what the other watchdogs say. A process that is dead says nothing.
std::vector<std::optional<Calls>> Monitor::calls_of_the_living(const Failure& first) {
  const auto& dead = first.data.ranks;
  std::vector<std::optional<Calls>> calls(roster_.devices().size());
  const auto all_known = [&] {
    for (int rank = 0; rank < static_cast<int>(calls.size()); ++rank) {
      if (!calls[rank] && !(first.is(Error::death) && std::count(dead.begin(), dead.end(), rank) > 0)) return false;
    }
    return true;
  };
  with_store([&] {
    for (const auto end = Clock::now() + kUntilToldCalls;; std::this_thread::sleep_for(10ms)) {
      calls = board_.known_calls();
      if (all_known() || Clock::now() >= end) return;
    }
  });
  return calls;
}

}  // namespace lockstep::comm
