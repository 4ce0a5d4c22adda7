// Communicator: a rank's part of what NCCL's stand-in calls so, where its kernels meet those of other ranks, which are
// threads or processes. As in NCCL, kernels of one communicator meet in the order in which they were queued. Each waits
// on its stream for the others. They leave inputs for each other in the store by which c10d would find the ranks.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "simulated_gpu/device/launch.hpp"

namespace simulated {

class Communicator {
 public:
  // How long the stand-in waits where NCCL would wait for ever.
  static constexpr std::chrono::seconds kStuck{10};

  Communicator(c10::intrusive_ptr<c10d::Store> store, std::string name, int rank, int size)
      : store_(std::move(store)), name_(std::move(name)), rank_(rank), size_(size) {}

  using Tensors = std::vector<at::Tensor>;

  struct Meeting {
    int rank;                 // who looks at it
    std::vector<Tensors> in;  // inputs by rank
    Tensors out;              // this rank's
  };

  // Makes the host wait for all members, as ncclCommInitRank does. No abort reaches it. False: they did not come within
  // kStuck, where NCCL would wait for ever.
  bool join();

  uint64_t take_ticket() { return tickets_++; }  // the next kernel's ticket

  enum class End { met, aborted, late };

  // Call it in a kernel: does `work` when all have come. Reports kernels that differ.
  End meet(uint64_t ticket, const std::string& what, const std::vector<View>& in, const std::vector<View>& out,
           const std::function<void(Meeting&)>& work, std::chrono::milliseconds timeout);

  void abort() { aborted_ = true; }  // sets this rank's flag; the others do not see it
  bool is_aborted() const { return aborted_; }

 private:
  std::string key(const std::string& place, int rank) const;
  void put(const std::string& key, const std::string& what, const Tensors& in);
  std::optional<std::vector<uint8_t>> look(const std::string& key);

  const c10::intrusive_ptr<c10d::Store> store_;
  const std::string name_;
  const int rank_, size_;
  std::atomic<bool> aborted_ = false;
  std::atomic<uint64_t> tickets_ = 0;
};

// Faults that a test lets happen to a rank of this process inside of NCCL. The rank may not survive them.
struct Faults {
  std::function<void()> in_init, in_kernel, in_shutdown;
};
Faults& faults();

}  // namespace simulated
