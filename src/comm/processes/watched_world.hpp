// A Monitor watches over the ranks of a WatchedWorld: ranks of several processes, or ranks over NCCL that are threads
// of one process.
//
// NCCL notices neither a rank that does not come nor one that has failed. Its waits have no limit: on the host while a
// communicator is made or taken down, on the device within a call. Therefore:
//
// 1. a communicator is made when all of its ranks have come, and before any rank makes a call;
// 2. it is taken down when all ranks of the world have returned, the same calls made;
// 3. both happen on threads of their own, which the caller leaves alone if the run fails meanwhile (Attempt);
// 4. a failure is known before it aborts every communicator, also one that is made meanwhile. So a rank whose wait an
//    abort has ended learns the failure when it asks;
// 5. c10d's watchdog sees calls that take too long, and the monitor's watchdog sees what c10d's saw;
// 6. the ranks' calls are noted, so that a rank which returns without a call that others made is found at once.
#pragma once

#include "comm/group_member.hpp"
#include "comm/job_key.hpp"
#include "comm/meeting/attempt.hpp"
#include "comm/meeting/shared_store.hpp"
#include "comm/world.hpp"
#include "monitor.hpp"
#include "process_work.hpp"

#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

namespace lockstep::comm {

// A WatchedPlace is a process's place in its run.
struct WatchedPlace {
  Roster roster;
  int process = 0;
  StorePtr monitor_store;
  StorePtr groups_store;  // a connection that all groups share
  std::chrono::milliseconds timeout, connect_timeout;
  std::string local_address = {};       // the address where peers reach this machine; for CPU ranks
  std::chrono::milliseconds silence{};  // the time until a process counts as dead, also one that proves nothing
  std::optional<JobKey> key = {};       // nothing: the members of a group need no proof
  // Calls its argument, which takes the groups' connections down, while the process goes on after the run. Null: the
  // world's end waits until they are down.
  std::function<void(std::function<void()>)> beside = {};
};

class WatchedWorld : public World {
 public:
  WatchedWorld(WatchedPlace place, const Monitor::Options& options);
  ~WatchedWorld() override;

  std::vector<std::string> processor_kinds() const override { return place_.roster.processor_kinds; }
  bool shares_gpus() const override { return place_.roster.shares_gpus; }
  c10::intrusive_ptr<c10d::Backend> backend(int rank, const Members& members) override;
  void check(int rank) override;
  void check_values(int rank) override;
  void abort(int, const Failure& reason) override;
  Failure failure() const override { return monitor_->failure(); }
  void leave(int rank) override;
  void stepped(int64_t steps) override { monitor_->stepped(steps); }
  Failure finish() override;

 protected:
  Monitor& monitor() { return *monitor_; }
  void stop_watching();  // afterwards nothing here uses the stores any more, except destructors

 private:
  struct Group {  // a Group is the whole world, or a group that ranks made
    int rank;
    GroupMember member;
  };

  bool over_nccl() const { return !devices()[0].is_cpu(); }
  // Connects as the `index`th of `members`, which are names for texts.
  GroupMember connect(int rank, const std::string& name, int index, const std::vector<std::string>& members,
                      const CallNotes& notes = {});
  GroupMember attend(const OpenCall& call, std::chrono::milliseconds timeout, const std::shared_ptr<Attempt>& attempt);
  CallNotes notes_of(int rank, const Members& members);
  std::vector<Group> groups();
  void complete_calls();
  Failure look();
  void take_down();
  void close();
  void let_groups_go();

  const WatchedPlace place_;
  std::mutex mutex_;
  bool closed_ = false;        // guarded by mutex_, as the next four
  std::vector<Group> groups_;  // groups in the order in which they were made
  std::vector<std::shared_ptr<OpenWorks>> open_works_;
  std::vector<std::jthread> closing_;
  std::shared_ptr<Monitor> monitor_;  // last, since its thread calls close() and look()
};

}  // namespace lockstep::comm
