// Ranks in several processes: on the CPU lockstep's ProcessBackend over Gloo, on GPUs NCCL. The processes find each
// other through the launcher's environment (launch_environment) and meet in a store (rendezvous, meeting). While they
// work they watch over each other (monitor).
#include <c10/util/Exception.h>
#include <torch/version.h>
#include <lockstep/base/error.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "base/seconds.hpp"
#include "comm/group_member.hpp"
#include "comm/job_options.hpp"
#include "comm/meeting/attempt.hpp"
#include "comm/meeting/meeting.hpp"
#include "comm/meeting/shared_store.hpp"
#include "comm/world.hpp"
#include "hierarchy.hpp"
#include "job.hpp"
#include "monitor.hpp"
#include "process_backend.hpp"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace lockstep::comm {
namespace {

constexpr std::chrono::milliseconds kFarewell{1'000};  // for the others to read why a run failed
constexpr std::chrono::milliseconds kMargin{10'000};   // Gloo gives up connecting later than the rank, which says why

struct Turn {
  int run = Job::of_this_process().begin();
  Turn() = default;
  ~Turn() { Job::of_this_process().end(); }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;
};

std::chrono::milliseconds rendezvous_timeout(const JobOptions& options) {
  const char* const text = std::getenv("LOCKSTEP_RENDEZVOUS_TIMEOUT");
  if (text == nullptr || *text == '\0') return options.rendezvous_timeout;
  char* end = nullptr;
  const double seconds = std::strtod(text, &end);
  if (*end != '\0' || !(seconds > 0) || seconds > 1e6) {
    throw Error("LOCKSTEP_RENDEZVOUS_TIMEOUT=" + std::string(text) + " in the environment is not a number of seconds");
  }
  return std::chrono::milliseconds(std::llround(std::ceil(seconds * 1000)));
}

// All processes must have this text in common.
std::string configuration(const LaunchEnvironment& launch, const Devices& devices, const JobOptions& options) {
  std::error_code ignored;
  const std::string program = std::filesystem::read_symlink("/proc/self/exe", ignored).filename().string();
  return "program " + program + ", lockstep " + LOCKSTEP_VERSION + ", LibTorch " + TORCH_VERSION + ", " +
         std::to_string(launch.world_size) + " processes, " + c10::DeviceTypeName(devices[0].type(), true) +
         " ranks, timeout " + seconds(options.timeout) + (launch.keep_going ? ", going on without lost workers" : "") +
         ", " + options.configuration;
}

// A part of the run's keys, for any thread.
StorePtr keys_of(const std::string& what, std::shared_ptr<SharedStore::Connection> connection,
                 std::stop_token stop = {}) {
  return c10::make_intrusive<c10d::PrefixStore>(
      what, c10::make_intrusive<SharedStore>(std::move(connection), std::move(stop)));
}

// All that a world needs before it can be one.
struct Place {
  LaunchEnvironment launch;
  Rendezvous& rendezvous;
  std::string prefix;
  std::chrono::milliseconds rendezvous_timeout;
  // All are connected before the meeting, since that may take seconds (see Rendezvous::connect), and right after it the
  // others listen for this process's heart.
  StorePtr store, monitor_store;
  std::shared_ptr<SharedStore::Connection> groups_store;
  Roster roster;

  static Place take(const LaunchEnvironment& launch, int run, const Devices& devices, const JobOptions& options) {
    const WaitLimit limit{comm::rendezvous_timeout(options), options.stop};
    Rendezvous& rendezvous = Job::of_this_process().rendezvous(launch, limit);
    Place place{launch,
                rendezvous,
                run_prefix(run),
                limit.timeout,
                rendezvous.connect(run_prefix(run)),
                rendezvous.connect(run_prefix(run)),
                std::make_shared<SharedStore::Connection>(rendezvous.connect(run_prefix(run))),
                {}};
    try {
      const Devices here = share_out(devices, launch.local_rank, launch.local_world_size);
      place.roster = meet(*place.store, launch, here, configuration(launch, devices, options), limit);
    } catch (const c10::DistError&) {
      rendezvous.drop_connections();
      throw;
    } catch (...) {
      const Failure failure = failure_of(std::current_exception());
      call_off(*place.store, failure);
      farewell(*place.store, rendezvous, kFarewell);
      rendezvous.drop_connections();
      failure.raise();
    }
    return place;
  }
};

class ProcessesWorld : public World {
 public:
  ProcessesWorld(std::unique_ptr<Turn> turn, Place place, const JobOptions& options)
      : World(place.roster.devices(), place.roster.ranks_of(place.launch.rank), place.launch.rank),
        turn_(std::move(turn)),
        place_(std::move(place)),
        timeout_(options.timeout),
        backends_(ranks_here().size()) {
    const std::string host =
        place_.launch.agent_store ? "the launcher" : "the process of " + place_.roster.name_process(0);
    monitor_ = std::make_shared<Monitor>(
        place_.monitor_store, place_.roster, place_.launch.rank,
        Monitor::Options{timeout_, options.silence, host, place_.launch.keep_going, options.stop});
    monitor_->start([this] { close(); });
    if (!devices()[0].is_cpu() || place_.roster.one_rank_per_process()) return;
    try {
      const int process = place_.launch.rank;
      const auto leaders = connect(static_cast<int>(ranks_here().begin), "leaders", process, place_.launch.world_size);
      const std::lock_guard lock(mutex_);
      hierarchy_ = std::make_shared<Hierarchy>(leaders, place_.roster, process, options.threads_per_rank);
      if (closed_) hierarchy_->close();
    } catch (...) {
      monitor_->report(failure_of(std::current_exception()));
      ProcessesWorld::finish().raise();
    }
  }

  ~ProcessesWorld() override {
    monitor_->stop();
    // Before the groups' destructors wait for what will never come, and before what a lost process may still send to is
    // freed.
    if (!monitor_->failure().empty() || monitor_->lost().count() > 0) close();
  }

  // A hierarchy is for calls of all ranks.
  c10::intrusive_ptr<c10d::Backend> backend(int rank, const Members& members) override {
    const auto group = connect(rank, "ranks" + members.name, members.index_of(rank), members.size());
    c10::intrusive_ptr<c10d::Backend> backend = group.backend;
    if (devices()[rank].is_cpu()) {
      backend = c10::make_intrusive<ProcessBackend>(rank, members, group, keys_of("parts", place_.groups_store),
                                                    monitor_, members.name.empty() ? hierarchy_ : nullptr, timeout_);
    }
    const std::lock_guard lock(mutex_);
    groups_.push_back(group);
    if (closed_) group.close();
    backends_[rank - ranks_here().begin].push_back(backend);
    return backend;
  }

  void abort(int, const Failure& reason) override { monitor_->report(reason); }

  void leave(int rank) override {
    if (devices()[rank].is_cpu()) return monitor_->returned(rank);
    const auto backends = [&] {
      const std::lock_guard lock(mutex_);
      return backends_[rank - ranks_here().begin];
    }();
    for (const auto& backend : backends) backend->shutdown();  // NCCL: waits for what is pending
  }

  void stepped(int64_t steps) override { monitor_->stepped(steps); }
  void allow_loss(int rank) override { monitor_->allow_loss(rank); }
  void forbid_loss(int rank) override { monitor_->forbid_loss(rank); }
  std::string why_lost(int rank) override { return monitor_->lost().reason_of(rank); }

  Failure finish() override {
    Failure failure = monitor_->finish();
    const int lost = std::max(monitor_->lost().count(), failure.kind == Failure::Kind::death ? 1 : 0);  // no farewell
    if (!monitor_->store_is_lost() && !monitor_->lost().is_lost(process())) {
      const auto limit = failure.empty() ? place_.rendezvous_timeout : kFarewell;
      const std::string foreign = farewell(*place_.store, rendezvous(), limit, lost);
      if (failure.empty()) failure = foreign;
    }
    if (!failure.empty()) rendezvous().drop_connections();
    return failure;
  }

 private:
  Rendezvous& rendezvous() const { return place_.rendezvous; }

  // Connects `rank` as the `index`th of `size` members. Fails when a peer has failed.
  GroupMember connect(int rank, const std::string& name, int index, int size) const {
    if (!devices()[rank].is_cpu()) {  // connects at its first call
      const auto store = rendezvous().connect(place_.prefix + "/" + name);
      return make_nccl_group({store, index, size, timeout_}, devices()[rank]);
    }
    const auto timeout = place_.rendezvous_timeout;
    const auto attempt = Attempt::start([name, index, size, timeout, connection = place_.groups_store,
                                         address = rendezvous().local_address()](const std::stop_token& stop) {
      return make_gloo_group({keys_of(name, connection, stop), index, size, timeout + kMargin}, address);
    });
    const OpenCall call{.rank = rank, .text = "connecting to the other ranks", .connects = true};
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

  void close() {
    const std::lock_guard lock(mutex_);
    if (std::exchange(closed_, true)) return;
    if (hierarchy_) hierarchy_->close();
    for (const auto& group : groups_) {
      if (group.close) group.close();
    }
  }

  const std::unique_ptr<Turn> turn_;
  const Place place_;
  const std::chrono::milliseconds timeout_;
  std::mutex mutex_;
  bool closed_ = false;                                                   // guarded by mutex_, as the next two
  std::vector<GroupMember> groups_;                                       // of the world and of groups
  std::vector<std::vector<c10::intrusive_ptr<c10d::Backend>>> backends_;  // by the rank's place in this process
  std::shared_ptr<Hierarchy> hierarchy_;
  std::shared_ptr<Monitor> monitor_;  // last, since its thread calls close()
};

}  // namespace

std::unique_ptr<World> make_processes_world(const Devices& devices, const JobOptions& options) {
  const auto launch = read_launch_environment(std::getenv);
  if (!launch || launch->world_size == 1) return nullptr;
  auto turn = std::make_unique<Turn>();
  try {
    auto place = Place::take(*launch, turn->run, devices, options);
    return std::make_unique<ProcessesWorld>(std::move(turn), std::move(place), options);
  } catch (const c10::DistError&) {  // of the store, whose words say nothing about whose it was
    throw Error("process " + std::to_string(launch->rank) + " of " + std::to_string(launch->world_size) + ": " +
                (launch->agent_store ? "the launcher" : "the process of rank 0") +
                " is gone: the store that it keeps does not answer");
  }
}

}  // namespace lockstep::comm
