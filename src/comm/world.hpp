// A World holds the ranks of one run together: it gives each a backend, and tells the others when one fails or is done.
// Ranks are named by their index in the whole world, of which this process may hold only some.
#pragma once

#include <lockstep/devices/devices.hpp>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "data/parts.hpp"
#include "failure.hpp"
#include "members.hpp"
#include "silence_limit.hpp"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <numeric>
#include <stop_token>
#include <string>
#include <utility>
#include <vector>

namespace lockstep::comm {

// More than twelve functions: they say who is here, how to reach the others, and what has failed.
class World {
 public:
  explicit World(Devices devices)
      : devices_(std::move(devices)), ranks_here_{0, static_cast<int64_t>(devices_.size())} {}
  virtual ~World() = default;

  const Devices& devices() const { return devices_; }  // gives the devices of all ranks
  Range ranks_here() const { return ranks_here_; }     // gives the ranks that are threads of this process
  int process() const { return process_; }             // gives this process's number among its launcher's

  // Gives each rank's kind of processor, see devices/processor_kind.hpp, or nothing if all ranks are in this process.
  virtual std::vector<std::string> processor_kinds() const { return {}; }

  // Tells whether some ranks share a GPU over NCCL.
  virtual bool shares_gpus() const { return false; }

  // The seed that LibTorch's CPU generator had when the run began, or that a rank set in its turn. The second says
  // whether another seed was seen.
  std::atomic<uint64_t> shared_seed{0};
  std::atomic<bool> another_seed_seen{false};
  std::atomic<bool> shared_draws_seen{false};  // a layer draws from that generator

  // Gives all ranks, as the members of the calls that they make together.
  Members everybody() const;

  // Gives the backend of `rank`, which is one of `members`. Call it once per rank for everybody(), and once on every
  // member of each group, from that rank's thread.
  virtual c10::intrusive_ptr<c10d::Backend> backend(int rank, const Members& members) = 0;

  // Throws Error on rank `rank` if the run has failed. Worlds whose backends' calls throw do not override it.
  virtual void check(int /*rank*/) {}

  // Throws likewise. Call it when the host of rank `rank` has waited for the device: after a failure, calls left no
  // values there.
  virtual void check_values(int /*rank*/) {}

  // Rank `rank` failed for `reason`: every wait of the others ends at once with an Error.
  virtual void abort(int rank, const Failure& reason) = 0;

  // Gives the run's failure, as other processes told this one; it is empty if there is none.
  virtual Failure failure() const { return {}; }

  // Rank `rank` is done and will make no further call: whoever waits for it fails at once. Throws Error if it was the
  // last, and some rank's call never came about; between processes finish() says so.
  virtual void leave(int rank) = 0;

  // Notes that a rank of this process has trained so many steps in all. Errors name them if the run fails.
  virtual void stepped(int64_t steps) {}

  // Call this when all ranks of this process have ended. Waits for the ranks of other processes. Gives the failure of
  // the rank that failed first in the whole world. It is empty if none failed, or if there are no other processes.
  virtual Failure finish() { return {}; }

 protected:
  World(Devices devices, Range ranks_here, int process)
      : devices_(std::move(devices)), ranks_here_(ranks_here), process_(process) {}

 private:
  const Devices devices_;
  const Range ranks_here_;
  const int process_ = 0;
};

inline Members World::everybody() const {
  Members members;
  members.ranks.resize(devices_.size());
  std::iota(members.ranks.begin(), members.ranks.end(), 0);
  return members;
}

// Makes a world of threads that exchange through shared memory, or between GPUs through peer copies, on any devices.
std::unique_ptr<World> make_in_process_world(const Devices& devices, std::chrono::milliseconds timeout);

// Makes a world of threads that exchange through NCCL. Give it distinct GPUs, unless ranks can share one. Gives null in
// a build without CUDA.
std::unique_ptr<World> make_nccl_world(const Devices& devices, std::chrono::milliseconds timeout);

// Says why ranks cannot share a GPU over NCCL here, and what lets them. Empty: they can.
std::string why_no_gpu_is_shared();

// JobOptions has the fields of RunOptions (rank.hpp) that the processes of a job need, under the same names.
struct JobOptions {
  std::chrono::milliseconds timeout, rendezvous_timeout;
  SilenceRange silence;
  std::stop_token stop;
  std::string configuration;  // a text that must be equal in all processes
};

// Makes a world of several processes, as the launcher in the environment says; `devices` is this machine's list. Gives
// null if no launcher started this process, or started this one alone. See processes.cpp.
std::unique_ptr<World> make_processes_world(const Devices& devices, const JobOptions& options);

}  // namespace lockstep::comm
