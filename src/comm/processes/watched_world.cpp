#include "watched_world.hpp"

#include <lockstep/base/error.hpp>

#include "comm/texts.hpp"
#include "process_backend.hpp"
#include "proven_group.hpp"

#include <exception>
#include <system_error>
#include <utility>

namespace lockstep::comm {
namespace {

constexpr std::chrono::milliseconds kMargin{10'000};  // Gloo must give up later than the rank, which says why

}  // namespace

WatchedWorld::WatchedWorld(WatchedPlace place, const Monitor::Options& options)
    : World(place.roster.devices(), place.roster.ranks_of(place.process), place.process),
      place_(std::move(place)),
      monitor_(std::make_shared<Monitor>(place_.monitor_store, place_.roster, place_.process, options)) {
  monitor_->start([this] { close(); }, [this] { return look(); });
}

WatchedWorld::~WatchedWorld() {
  stop_watching();
  let_groups_go();
}

void WatchedWorld::stop_watching() {
  monitor_->stop();
  if (!monitor_->failure().empty()) close();  // before the groups' destructors wait for calls that will never come
}

// ---- Connecting.

// A rank that is alone in its group needs no connections and no communicator,
// which cost memory and threads. Other ranks' devices may not be of this machine, so the rank's own device stands for
// them.
c10::intrusive_ptr<c10d::Backend> WatchedWorld::backend(int rank, const Members& members) {
  if (members.size() == 1) {
    return make_in_process_world(Devices(devices().size(), devices()[rank]), place_.timeout)->backend(rank, members);
  }
  std::vector<std::string> names;
  for (const int member : members.ranks) names.push_back(place_.roster.name(member));
  const auto group = connect(rank, "ranks" + members.name, members.index_of(rank), names, notes_of(rank, members));
  c10::intrusive_ptr<c10d::Backend> backend = group.backend;
  const auto open_works = std::make_shared<OpenWorks>();
  if (over_nccl()) {
    monitor_->log().join(rank, members.name);
  } else {
    backend = c10::make_intrusive<ProcessBackend>(rank, members, group,
                                                  c10::make_intrusive<SharedStore>("parts", place_.groups_store),
                                                  monitor_, open_works, place_.timeout);
  }
  bool closed = false;
  {
    const std::lock_guard lock(mutex_);
    groups_.push_back({rank, group});
    open_works_.push_back(open_works);
    closed = closed_;
  }
  if (closed) group.close();
  return backend;
}

// Throws Error when a peer has failed.
GroupMember WatchedWorld::connect(int rank, const std::string& name, int index, const std::vector<std::string>& members,
                                  const CallNotes& notes) {
  const auto connecting = [=, connection = place_.groups_store, timeout = place_.timeout,
                           connect_timeout = place_.connect_timeout, address = place_.local_address, key = place_.key,
                           silence = place_.silence, device = devices()[rank]](const std::stop_token& stop) {
    GroupPlace place{c10::make_intrusive<SharedStore>(name, connection, stop), index, static_cast<int>(members.size()),
                     timeout};
    if (!device.is_cpu()) return make_nccl_group(place, device, notes);
    place.timeout = connect_timeout + kMargin;
    if (!key) return make_gloo_group(place, address);
    return make_proven_group({place, address, *key, name, members, silence}, stop);
  };
  return attend({.rank = rank, .text = "connecting to the other ranks", .connects = true}, place_.connect_timeout,
                Attempt::start(connecting));
}

// Gives what the attempt gives. Throws if the run fails meanwhile.
GroupMember WatchedWorld::attend(const OpenCall& call, std::chrono::milliseconds timeout,
                                 const std::shared_ptr<Attempt>& attempt) {
  const Monitor::Waiting waiting(*monitor_, call, timeout, [attempt] { attempt->wake(); });
  std::exception_ptr cause;
  try {
    while (monitor_->failure().empty()) {
      if (auto group = attempt->wait()) return *std::move(group);
    }
  } catch (const Error&) {
    throw;
  } catch (...) {
    cause = std::current_exception();
  }
  attempt->call_off();
  monitor_->explain(waiting, call, cause);
}

CallNotes WatchedWorld::notes_of(int rank, const Members& members) {
  return {place_.roster.name(rank), [monitor = monitor_] { return monitor->is_over(); },
          [=, monitor = monitor_, name = members.name](const std::string& call) {
            monitor->log().add_collective(rank, name, call);
          },
          [=, monitor = monitor_, ranks = members.ranks](int peer, bool sends) {
            monitor->log().add_message(rank, ranks.at(peer), sends);
          }};
}

// ---- Failures.

// The calls of CPU ranks throw by themselves.
void WatchedWorld::check(int rank) {
  if (over_nccl() && monitor_->failed()) monitor_->raise(rank);
}

void WatchedWorld::check_values(int rank) {
  if (!over_nccl()) return;
  if (const Failure failure = look(); !failure.empty()) monitor_->report(failure);
  check(rank);
}

// NCCL's error comes first: c10d's errors about later calls follow from it.
void WatchedWorld::abort(int, const Failure& reason) {
  const Failure seen = look();
  monitor_->report(seen.empty() ? reason : seen);
}

// Gives NCCL's own error, if there is one.
Failure WatchedWorld::look() {
  const std::lock_guard lock(mutex_);
  for (const auto& [rank, member] : groups_) {
    if (!member.error) continue;
    const Failure error = member.error();
    if (error.empty()) continue;
    // A rank that waited too long is not the one at fault.
    const std::vector<int> ranks = error.is(Error::late) ? std::vector<int>() : std::vector{rank};
    return {name_of(rank, devices()) + ": " + error.text, {error.data.cause, ranks}};
  }
  return {};
}

std::vector<WatchedWorld::Group> WatchedWorld::groups() {
  const std::lock_guard lock(mutex_);
  return groups_;
}

// An abort of NCCL waits for what its communicator does, so each gets a thread: none waits for another, and the caller
// does not wait.
void WatchedWorld::close() {
  const std::lock_guard lock(mutex_);
  if (std::exchange(closed_, true)) return;
  for (const auto& group : groups_) {
    try {
      closing_.emplace_back(group.member.close);
    } catch (const std::system_error&) {  // there are no more threads to be had
      group.member.close();
    }
  }
}

// Gloo takes some 10 ms for each connection, and for its thread.
void WatchedWorld::let_groups_go() {
  struct Remains {
    std::vector<std::shared_ptr<OpenWorks>> open_works;  // first, since Gloo may write to their tensors until the end
    std::vector<Group> groups;
    std::vector<std::jthread> closing;  // last, so that these threads end before the groups that they close
  };
  auto remains = std::make_shared<Remains>(Remains{std::move(open_works_), std::move(groups_), std::move(closing_)});
  if (place_.beside) place_.beside([remains = std::move(remains)]() mutable { remains = nullptr; });
}

// ---- The end.

void WatchedWorld::leave(int rank) {
  check_values(rank);
  monitor_->returned(rank);
}

Failure WatchedWorld::finish() {
  const Failure failure = monitor_->finish([this] { complete_calls(); });
  if (!failure.empty() || !over_nccl()) return failure;
  take_down();
  return monitor_->finish_taking_down();
}

// Completes the calls that nobody waited for.
void WatchedWorld::complete_calls() {
  for (const auto& works : open_works_) {
    for (const auto& work : works->all()) {
      try {
        work->wait();
      } catch (...) {
        return monitor_->report(failure_of(std::current_exception()));
      }
    }
  }
}

// Takes down the communicators of each rank in the order in which they were made, which is the same on all ranks.
void WatchedWorld::take_down() {
  std::vector<std::pair<int, std::shared_ptr<Attempt>>> attempts;
  try {
    for (int64_t rank = ranks_here().begin; rank < ranks_here().end; ++rank) {
      attempts.emplace_back(rank, Attempt::start([rank, groups = groups()](const std::stop_token& stop) {
                              for (const auto& group : groups) {
                                if (group.rank == rank) group.member.take_down(stop);
                              }
                              return GroupMember();
                            }));
    }
  } catch (...) {  // there are no more threads to be had
    monitor_->report(failure_of(std::current_exception()));
  }
  for (const auto& [rank, attempt] : attempts) {
    try {
      attend({.rank = rank, .text = "taking down its communicators"}, place_.timeout, attempt);
    } catch (...) {
      monitor_->report(failure_of(std::current_exception()));
    }
  }
}

}  // namespace lockstep::comm
