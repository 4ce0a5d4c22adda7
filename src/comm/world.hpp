// A World holds the ranks of one run together: it gives each its backend, and tells the others when one fails or is
// done. Ranks are named by their index in the whole world, of which this process may hold a part.
#pragma once

#include <lockstep/data/parts.hpp>
#include <lockstep/devices/devices.hpp>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "failure.hpp"
#include "members.hpp"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

namespace lockstep::comm {

struct JobOptions;

class World {
 public:
  explicit World(Devices devices)
      : devices_(std::move(devices)), ranks_here_{0, static_cast<int64_t>(devices_.size())} {}
  virtual ~World() = default;

  const Devices& devices() const { return devices_; }  // of all ranks
  Range ranks_here() const { return ranks_here_; }     // the ranks that are threads of this process
  int process() const { return process_; }             // of this process among those of its launcher

  // By rank, see devices/processor_kind.hpp. Empty: all are of this process.
  virtual std::vector<std::string> processor_kinds() const { return {}; }

  // The seed that LibTorch's CPU generator had when the run began, or that a rank set in its turn. The second says
  // whether another seed was seen.
  std::atomic<uint64_t> shared_seed{0};
  std::atomic<bool> another_seed_seen{false};
  std::atomic<bool> shared_draws_seen{false};  // of a layer that draws from that generator

  // All ranks, as the members of the calls that they make together.
  Members everybody() const;

  // The backend of `rank` among `members`, of which it is one. Called once per rank for everybody(), and once per
  // member of each group, from that rank's thread; all members of a group call it.
  virtual c10::intrusive_ptr<c10d::Backend> backend(int rank, const Members& members) = 0;

  // Throws Error on rank `rank` if the run has failed. Backends whose calls say so themselves leave it as it is.
  virtual void check(int /*rank*/) {}

  // The same when the host of rank `rank` has waited for its device: then what calls left there are no values.
  virtual void check_values(int /*rank*/) {}

  // Rank `rank` failed for `reason`: every wait of the others ends at once with an Error.
  virtual void abort(int rank, const Failure& reason) = 0;

  // Why the run has failed, as this process knows from others; empty if it has not.
  virtual Failure failure() const { return {}; }

  // Rank `rank` is done and will make no further call: whoever waits for it fails at once. Throws Error if it was the
  // last, and some rank's call never came about; between processes finish() says so.
  virtual void leave(int rank) = 0;

  // Notes that a rank of this process has trained so many steps in all. Errors name them if the run fails.
  virtual void stepped(int64_t steps) {}

  // All ranks of this process have ended. Waits for those of other processes, and gives the failure of the rank
  // that failed first in the whole world. It is empty if none failed, or if only this process can know.
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

// Ranks as threads that exchange through shared memory, or through peer copies between GPUs. Works for any device list.
std::unique_ptr<World> make_in_process_world(const Devices& devices, std::chrono::milliseconds timeout);

// Ranks as threads that exchange through NCCL; needs distinct GPUs. Null in a build without CUDA.
std::unique_ptr<World> make_nccl_world(const Devices& devices, std::chrono::milliseconds timeout);

// Ranks in several processes, as the launcher in the environment says; `devices` is this machine's list. Null if no
// launcher started this process, or if it started this one alone. See processes.cpp.
std::unique_ptr<World> make_processes_world(const Devices& devices, const JobOptions& options);

}  // namespace lockstep::comm
