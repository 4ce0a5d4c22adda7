// A World holds the ranks of one run together: it gives each its backend, and tells the others when one fails or is
// done.
#pragma once

#include <lockstep/devices.hpp>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <chrono>
#include <memory>
#include <string>

namespace lockstep::comm {

class World {
 public:
  virtual ~World() = default;

  // The backend of `rank`; called once per rank, from that rank's thread.
  virtual c10::intrusive_ptr<c10d::Backend> backend(int rank) = 0;

  // Rank `rank` failed for `reason`: every wait of the others ends at once with an Error.
  virtual void abort(int rank, const std::string& reason) = 0;

  // Rank `rank` is done and will make no further call: whoever waits for it fails at once. Throws Error if it was the
  // last, and some rank's call never came about.
  virtual void leave(int rank) = 0;
};

// "rank 1 (cpu)": how every text names a rank.
std::string name_of(int rank, const Devices& devices);

// Ranks as threads that exchange through shared memory, or through peer copies between GPUs. Works for any device list.
std::unique_ptr<World> make_in_process_world(const Devices& devices, std::chrono::milliseconds timeout);

// Ranks as threads that exchange through NCCL; needs distinct GPUs. Null in a build without CUDA.
std::unique_ptr<World> make_nccl_world(const Devices& devices, std::chrono::milliseconds timeout);

}  // namespace lockstep::comm
