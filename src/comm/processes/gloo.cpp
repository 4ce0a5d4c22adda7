// This file calls c10d's Gloo. LibTorch's wheel holds Gloo without its headers. The headers come from the system, and
// nothing of the system's Gloo is linked.
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "base/classic.hpp"
#include "base/libtorch_log.hpp"
#include "base/signals.hpp"
#include "base/start_thread.hpp"
#include "comm/group_member.hpp"
#include "door.hpp"
#include "guests.hpp"
#include "keys_of_members.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <exception>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace lockstep::comm {
namespace {

using c10d::ProcessGroupGloo;

constexpr int kMostThreadsTried = 16;
constexpr int kClosingTag = 0x7fff << 16;  // serves only once a run has failed, so a message may have the same tag
// These limit the wait for calls whose connections are closed. Most end within the first time.
constexpr std::chrono::milliseconds kUntilEnded{20}, kUntilForgotten{500};

// Insides names members of c10d's class that only a derived class may name.
struct Insides : ProcessGroupGloo {
  // c10d counts its collectives and takes the count as the tag. Our tag says more (see tag_of in process_backend.cpp),
  // so the count is set before each call.
  static void set_counter(ProcessGroupGloo& group, uint32_t count) { group.*(&Insides::collectiveCounter_) = count; }

  // Gives the collective calls that the group's threads work at, or have in their queue.
  static std::vector<c10::intrusive_ptr<c10d::Work>> open_calls(ProcessGroupGloo& group) {
    const std::lock_guard lock(group.*(&Insides::workMutex_));
    std::vector<c10::intrusive_ptr<c10d::Work>> calls;
    for (const auto& call : group.*(&Insides::workInProgress_)) {
      if (call) calls.emplace_back(call);  // an idle thread has no call
    }
    for (const auto& call : group.*(&Insides::workQueue_)) calls.emplace_back(call);
    return calls;
  }
};

struct InsidesOfWork : c10d::Work {
  static void end(c10d::Work& work, const std::exception_ptr& why) { (work.*(&InsidesOfWork::finish))(why); }
};

std::vector<std::shared_ptr<gloo::transport::Device>> devices_for(const std::string& local_address) {
  std::vector<std::shared_ptr<gloo::transport::Device>> devices;
  const char* const names = std::getenv("GLOO_SOCKET_IFNAME");
  Classic<std::istringstream> interfaces(names == nullptr ? "" : names);
  for (std::string name; std::getline(interfaces, name, ',');) {
    if (!name.empty()) devices.push_back(ProcessGroupGloo::createDeviceForInterface(name));
  }
  if (devices.empty()) devices.push_back(ProcessGroupGloo::createDeviceForHostname(local_address));
  return devices;
}

// c10d offers no way to end Gloo's waits. But a receive that times out closes all connections of its context, and so
// ends all waits on either side. There is one context per device, picked by the tag. If a peer's connection is closed
// already, a receive from the peer fails at once and closes nothing, so each peer is tried.
void close_connections(ProcessGroupGloo& group, int contexts) {
  const SignalBlocked sigpipe_blocked(SIGPIPE);
  for (int context = 0; context < contexts; ++context) {
    for (int peer = 0; peer < group.getSize(); ++peer) {
      if (peer == group.getRank()) continue;
      try {
        std::vector<at::Tensor> nothing{at::zeros({1})};
        group.recv(nothing, peer, kClosingTag + context)->wait(std::chrono::milliseconds(1));
      } catch (const std::exception&) {  // this is intended
      }
    }
  }
}

// When a connection closes, Gloo wakes the calls that wait for a message over it. Gloo forgets calls whose tensor was
// just being written: Pair::signalException() of the TCP transport leaves that queue out. Such a call never ends,
// c10d's thread stays in it, and the group's destructor would wait for the thread. So a call that does not end soon is
// ended here, and its rank goes on. If Gloo's thread does not come back either, the group lives as long as the process:
// this reference is never given back.
void end_forgotten_calls(const c10::intrusive_ptr<ProcessGroupGloo>& group) {
  using Clock = std::chrono::steady_clock;
  const auto begin = Clock::now();
  const auto are_open_until = [&](std::chrono::milliseconds limit) {
    while (!Insides::open_calls(*group).empty()) {
      if (Clock::now() > begin + limit) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return false;
  };
  if (!are_open_until(kUntilEnded)) return;
  const auto why = std::make_exception_ptr(std::runtime_error("the group's connections are closed"));
  for (const auto& call : Insides::open_calls(*group)) InsidesOfWork::end(*call, why);
  if (!are_open_until(kUntilForgotten)) return;
  [[maybe_unused]] const auto* const kept = c10::intrusive_ptr<ProcessGroupGloo>(group).release();
}

// Starts `count` threads at once, and ends them. c10d ends the process if only some of its threads can be started. A
// success proves nothing, since other processes of this user may take threads in between.
void check_that_threads_start(int count) {
  std::mutex gate;
  std::vector<std::jthread> threads;
  const std::lock_guard closed(gate);  // the gate opens before the threads are joined
  for (int i = 0; i < count; ++i) {
    threads.push_back(start_thread<std::jthread>([&] { const std::lock_guard passes(gate); }));
  }
}

// A Gate is the store as Gloo sees it while a guarded group connects. For each device, Gloo writes a listening address
// there, and connects to the others after reading theirs. So a door is open from when all members have one until all
// are connected, and nobody learns sooner where it is.
class Gate : public c10d::PrefixStore {
 public:
  explicit Gate(GroupPlace place) : PrefixStore("gloo", place.store), place_(std::move(place)) {}

  using PrefixStore::set;
  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    const auto doors = doors_told_in(value);
    warn_of_open_doors(shut_doors(doors));
    doors_.insert(doors_.end(), doors.begin(), doors.end());
    wait_for_members(place_, "ready/" + std::to_string(devices_++), place_.timeout);
    if (place_.hushed) {
      Guests::tell_of_doors(*place_.store, place_.rank, doors);
      warn_of_open_doors(hush_doors(doors));
    } else {
      open_doors(doors);
    }
    PrefixStore::set(key, value);
  }

  void shut() { warn_of_open_doors(shut_doors(doors_)); }

 private:
  void warn_of_open_doors(const std::string& why) {
    static std::atomic<bool> has_warned = false;  // one warning is enough, since a process makes many groups
    if (why.empty() || has_warned.exchange(true)) return;
    warn_as_libtorch("lockstep: this system shuts no ports (" + why +
                     "), so strangers can connect to those of the ranks. Without the job's key they get no rank's "
                     "place, but they can end a process. Use a network that strangers cannot reach");
  }

  const GroupPlace place_;
  std::vector<int> doors_;
  int devices_ = 0;
};

}  // namespace

GroupMember make_gloo_group(const GroupPlace& place, const std::string& local_address) {
  auto options = ProcessGroupGloo::Options::create(place.timeout);
  options->devices = naming_thread_limit([&] { return devices_for(local_address); });
  const auto contexts = static_cast<int>(options->devices.size());
  options->threads = 2 * contexts;
  // Members on this machine, which have the same limit, start their threads at the same time.
  check_that_threads_start(std::min(options->threads * place.size, kMostThreadsTried));
  const auto gate = place.guarded ? c10::make_intrusive<Gate>(place) : c10::intrusive_ptr<Gate>();
  const auto store = gate ? c10::intrusive_ptr<c10d::Store>(gate) : place.store;
  const auto backend = naming_thread_limit(
      [&] { return c10::make_intrusive<ProcessGroupGloo>(store, place.rank, place.size, options); });
  return {.backend = backend,
          .close =
              [backend, contexts] {
                close_connections(*backend, contexts);
                end_forgotten_calls(backend);
              },
          .use_tag = [backend](uint32_t tag) { Insides::set_counter(*backend, tag); },
          .connections = contexts,
          .shut =
              [gate] {
                if (gate) gate->shut();
              }};
}

}  // namespace lockstep::comm
