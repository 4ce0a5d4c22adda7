// This file makes ranks in several processes: on the CPU over lockstep's ProcessBackend and Gloo, on GPUs over NCCL.
// The processes find each other through the launcher's environment (launch_environment) and meet in a store
// (rendezvous, meeting). At work they watch over each other (monitor).
#include <c10/util/Exception.h>
#include <torch/version.h>
#include <lockstep/base/error.hpp>
#include <lockstep/base/version.hpp>

#include "base/build_id.hpp"
#include "base/seconds.hpp"
#include "comm/meeting/meeting.hpp"
#include "job.hpp"
#include "watched_world.hpp"

#include <cstdlib>
#include <filesystem>
#include <memory>
#include <utility>

namespace lockstep::comm {
namespace {

constexpr std::chrono::milliseconds kFarewell{1'000};  // the others have so long to read why a run failed

struct Turn {
  int run = Job::of_this_process().begin();
  ~Turn() { Job::of_this_process().end(); }
  Turn& operator=(Turn&&) = delete;
};

// Gives nothing if the linker gave the program no identity.
std::string build_text(bool may_differ) {
  if (may_differ) return ", any build (LOCKSTEP_MIXED_BUILDS=1)";
  const std::string id = build_id();
  return id.empty() ? "" : ", build " + id;
}

// Gives a text that has to be equal in all processes.
std::string configuration(const LaunchEnvironment& launch, const Devices& devices, const JobOptions& options) {
  std::error_code ignored;
  const std::string program = std::filesystem::read_symlink("/proc/self/exe", ignored).filename().string();
  return "program " + program + build_text(launch.mixed_builds) + ", lockstep " + version() + ", LibTorch " +
         TORCH_VERSION + ", " + std::to_string(launch.world_size) + " processes, " +
         c10::DeviceTypeName(devices[0].type(), true) + " ranks" +
         (mixed_processors_in(std::getenv) ? " on any processors (LOCKSTEP_MIXED_PROCESSORS=1)" : "") + ", timeout " +
         seconds(options.timeout) + (launch.key_file.empty() ? "" : ", with a job's key (LOCKSTEP_JOB_KEY_FILE)") +
         ", " + options.configuration;
}

// A Place has all that a process needs before its world is made.
struct Place {
  LaunchEnvironment launch;
  Rendezvous& rendezvous;
  std::chrono::milliseconds rendezvous_timeout;
  // All are connected before the meeting: that may take seconds (see Rendezvous::connect), and right after the meeting
  // the others listen for this process's heart.
  StorePtr store, monitor_store, groups_store;
  Roster roster;

  static Place take(const LaunchEnvironment& launch, const std::string& keys, const Devices& devices,
                    const JobOptions& options) {
    const WaitLimit limit{rendezvous_timeout_in(std::getenv).value_or(options.rendezvous_timeout), options.stop};
    Rendezvous& rendezvous = Job::of_this_process().rendezvous(launch, limit);
    Place place{
        launch, rendezvous, limit.timeout, rendezvous.connect(keys), rendezvous.connect(keys), rendezvous.connect(keys),
        {}};
    try {
      const Devices here = share_out(devices, launch.local_rank, launch.local_world_size);
      place.roster = meet(*place.store, launch, here, configuration(launch, devices, options), limit);
      rendezvous.take_note_away();
    } catch (const c10::DistError&) {
      rendezvous.drop_connections();
      throw;
    } catch (const NobodyMissed&) {  // the other job goes on
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

// A process of an elastic job goes on in another generation, so its old connections are taken down meanwhile.
WatchedPlace watched(const Place& place, const JobOptions& options) {
  std::function<void(std::function<void()>)> beside;
  if (Job& job = Job::of_this_process(); job.seat())
    beside = [&job](std::function<void()> work) { job.do_beside(std::move(work)); };
  return {.roster = place.roster,
          .process = place.launch.rank,
          .monitor_store = place.monitor_store,
          .groups_store = place.groups_store,
          .timeout = options.timeout,
          .connect_timeout = place.rendezvous_timeout,
          .local_address = place.rendezvous.local_address(),
          .silence = options.silence.most,
          .key = place.rendezvous.key(),
          .beside = beside};
}

Monitor::Options watched_by(const Place& place, const JobOptions& options) {
  const std::string host = place.launch.agent_store ? "the launcher" : "the process of " + place.roster.name_process(0);
  return {options.timeout, options.silence, host, options.stop};
}

class ProcessesWorld : public WatchedWorld {
 public:
  ProcessesWorld(std::unique_ptr<Turn> turn, Place place, const JobOptions& options)
      : WatchedWorld(watched(place, options), watched_by(place, options)),
        turn_(std::move(turn)),
        place_(std::move(place)) {}
  ~ProcessesWorld() override { stop_watching(); }

  Failure finish() override {
    Failure failure = WatchedWorld::finish();
    const int silent = failure.is(Error::death) ? 1 : 0;  // a dead process says no farewell
    if (!monitor().store_is_lost()) {
      const auto limit = failure.empty() ? place_.rendezvous_timeout : kFarewell;
      const Failure foreign = farewell(*place_.store, place_.rendezvous, limit, silent);
      if (failure.empty()) failure = foreign;
    }
    if (!failure.empty()) place_.rendezvous.drop_connections();
    return failure;
  }

 private:
  const std::unique_ptr<Turn> turn_;
  const Place place_;
};

}  // namespace

std::unique_ptr<World> make_processes_world(const Devices& devices, const JobOptions& options) {
  Job& job = Job::of_this_process();
  const auto launch = job.launch();
  if (!launch || launch->world_size == 1) return nullptr;
  auto turn = std::make_unique<Turn>();
  try {
    const auto seat = job.seat();
    auto place = Place::take(*launch, seat ? seat->keys : run_prefix(turn->run), devices, options);
    return std::make_unique<ProcessesWorld>(std::move(turn), std::move(place), options);
  } catch (const c10::DistError&) {  // the store's error does not say whose the store was
    throw Error(launch->process_name() + ": " + (launch->agent_store ? "the launcher" : "the process of rank 0") +
                    " is gone: the store that it keeps does not answer",
                {Error::machine});
  }
}

}  // namespace lockstep::comm
