// GroupMember: one member of a c10d backend that reaches over processes. Gloo for tensors on the CPU, NCCL for GPUs.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>

namespace lockstep::comm {

struct GroupMember {
  c10::intrusive_ptr<c10d::Backend> backend;
  std::function<void()> close;  // ends everything that waits, here and at the peers; for when the run has failed
  std::function<void(uint32_t tag)> use_tag = {};  // sets the next collective call's tag; calls meet if tags are equal;
                                                   // null: the backend has no tags (NCCL)
};

struct GroupPlace {
  c10::intrusive_ptr<c10d::Store> store;  // this member's own connection
  int rank = 0;
  int size = 1;
  std::chrono::milliseconds timeout{};  // for connecting, and for calls that name none
};

// Connects to all other members, which must make the same call. Tensors must lie on the CPU. `local_address` is where
// peers reach this machine; GLOO_SOCKET_IFNAME in the environment overrules it. Throws Error in a build without Gloo.
GroupMember make_gloo_group(const GroupPlace& place, const std::string& local_address);

// Throws Error in a build without CUDA.
GroupMember make_nccl_group(const GroupPlace& place, const c10::Device& device);

}  // namespace lockstep::comm
