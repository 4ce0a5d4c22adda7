// Ranks: run() calls a function once per device, all at the same time, and each call's Rank talks to the others.
//
// A rank is one device with one replica of the model; here it is a thread of this process. A Rank is used by its own
// thread only. Its backend is c10d's interface: lockstep's own for threads of one process, NCCL between distinct GPUs
// where this build has it. Cost of run(): one thread per rank. Every wait has a timeout, and a rank that fails ends the
// others.
#pragma once

#include <lockstep/devices.hpp>
#include <lockstep/split.hpp>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <chrono>
#include <functional>

namespace lockstep {

class Rank {
 public:
  Rank(int index, int world_size, c10::Device device, c10::intrusive_ptr<c10d::Backend> backend);

  int index() const { return index_; }            // 0 … world_size() - 1
  int world_size() const { return world_size_; }  // 1 is a normal world: every collective works
  c10::Device device() const { return device_; }

  // For everything that c10d can do, also asynchronously. All ranks must make the same collective calls in the same
  // order.
  c10d::Backend& backend() { return *backend_; }

  // The most used collectives, waited for; tensors are changed in place and lie on device(). They throw Error that
  // names this rank, the operation and the others' calls when ranks disagree, when a rank is missing at the timeout, or
  // when another rank failed.
  void allreduce(at::Tensor tensor, c10d::ReduceOp op = c10d::ReduceOp::SUM);
  void broadcast(at::Tensor tensor, int root = 0);
  void barrier();

  // function() on one rank after the other, rank 0 first. For what draws from LibTorch's default generator, which all
  // ranks of a process share: after torch::manual_seed, weights made in turn depend on the seed alone.
  template <class Function>
  auto in_turn(Function&& function) {
    for (int turn = 0; turn < index_; ++turn) barrier();
    auto result = function();
    for (int turn = index_; turn < world_size_; ++turn) barrier();
    return result;
  }

  // Where this rank stands, for split_and_load's and batches' parts.
  operator Shard() const { return {index_, world_size_, device_}; }

 private:
  int index_;
  int world_size_;
  c10::Device device_;
  c10::intrusive_ptr<c10d::Backend> backend_;
};

struct RunOptions {
  int threads_per_rank = 1;                    // intra-op threads of each rank's thread
  std::chrono::milliseconds timeout{300'000};  // of every wait for another rank
};

// Calls body(rank) once per entry of `devices`, each on a thread of its own with its own intra-op thread count and
// devices[rank] as its current device, and waits for all of them. Runs may nest and repeat; nothing is left behind. If
// a body throws, the other ranks' waits end at once, and run() rethrows the first failure as an Error that names the
// rank and the device, with the original exception nested. (A rank that computes is not interrupted: it ends at its
// next collective.) Throws Error: no devices, a GPU that is not there, CPU and GPU mixed, threads_per_rank < 1, timeout
// <= 0.
void run(const Devices& devices, const std::function<void(Rank&)>& body, const RunOptions& options = {});

}  // namespace lockstep
