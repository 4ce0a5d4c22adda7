// A GroupMember is one member of a c10d backend between processes: Gloo for tensors in the CPU's memory, NCCL for GPUs.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "failure.hpp"

#include <chrono>
#include <cstdint>
#include <functional>
#include <stop_token>
#include <string>

namespace lockstep::comm {

struct GroupMember {
  c10::intrusive_ptr<c10d::Backend> backend;
  std::function<void()> close;  // ends all waits, here and at the peers; call it when the run has failed
  std::function<void(uint32_t tag)> use_tag = {};  // sets the next collective call's tag; calls meet if tags are equal;
                                                   // null: the backend has no tags (NCCL)
  // The number of connections to each peer. Messages take different ones if their tags differ modulo this number.
  int connections = 1;
  std::function<void()> shut = {};  // needs GroupPlace::guarded: after it nobody can connect
  // NCCL alone has these two. Gloo has null, since its waits end and say why.
  std::function<Failure()> error = {};                  // why calls ended without their values; none: they did not
  std::function<void(std::stop_token)> take_down = {};  // waits for all calls, then lets go what they needed
};

struct GroupPlace {
  c10::intrusive_ptr<c10d::Store> store;  // this member's own connection
  int rank = 0;
  int size = 1;
  std::chrono::milliseconds timeout{};  // the timeout for connecting, and for calls without one
  // Gloo alone looks at it: nobody can connect before all members are ready to, nor after GroupMember::shut.
  bool guarded = false;
  bool hushed = false;  // needs `guarded`: whoever has connected cannot talk until let in (processes/guests.hpp)
};

// The backend calls these functions for each call once it is posted, on the thread that posts.
struct CallNotes {
  std::string rank;               // "rank 1 (cuda:1)"
  std::function<bool()> is_over;  // tells whether the run is over; then no more calls can be made
  std::function<void(const std::string& call)> collective;  // "allreduce(sum) of float [2]"
  std::function<void(int peer, bool sends)> message;        // `peer` as the group numbers it
};

// Connects to all other members; call this on all of them. Use it for tensors on the CPU. `local_address` is where
// peers reach this machine; GLOO_SOCKET_IFNAME in the environment overrules it. Throws Error in a build without Gloo.
GroupMember make_gloo_group(const GroupPlace& place, const std::string& local_address);

// Connects to all other members, without a limit of time: only its waits in the store can end early. `place.timeout` is
// for calls. Throws Error in a build without CUDA.
GroupMember make_nccl_group(const GroupPlace& place, const c10::Device& device, const CallNotes& notes);

}  // namespace lockstep::comm
