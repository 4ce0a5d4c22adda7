// Communicator: where the kernels of NCCL's stand-in meet. As in NCCL, those of one communicator meet in the order in
// which they were queued, and each waits on its stream for the others.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "simulated/device/launch.hpp"

namespace simulated {

class Communicator {
 public:
  // How long the stand-in waits where NCCL would wait for ever.
  static constexpr std::chrono::seconds kStuck{10};

  explicit Communicator(int size) : size_(size), tickets_(static_cast<size_t>(size)) {}

  struct Meeting {
    std::string what;
    int arrived = 0;
    bool done = false;
    std::vector<std::vector<View>> in, out;  // by rank
  };

  // As ncclCommInitRank: the host waits for all members. No abort reaches it. False: they did not come within kStuck,
  // where NCCL would wait for ever.
  bool join();

  // Of a rank's next kernel.
  uint64_t take_ticket(int rank);

  enum class End { met, aborted, late };

  // In a kernel: `work` is done once, when all have come. Reports kernels that differ.
  End meet(int rank, uint64_t ticket, const std::string& what, std::vector<View> in, std::vector<View> out,
           const std::function<void(Meeting&)>& work, std::chrono::milliseconds timeout);

  // For messages of two members of a communicator that was made eagerly: nobody waits for the other to make it.
  std::shared_ptr<Communicator> pair(int low, int high);

  void abort(int rank);  // each member has its own flag
  bool is_aborted(int rank);

 private:
  const int size_;
  std::mutex mutex_;
  std::condition_variable changed_;
  int joined_ = 0;
  std::set<int> aborted_;
  std::map<uint64_t, Meeting> meetings_;
  std::vector<std::atomic<uint64_t>> tickets_;  // by rank
  std::map<std::pair<int, int>, std::shared_ptr<Communicator>> pairs_;
};

// Communicators by their number, which a member gives to the others in place of NCCL's unique id.
std::string add_communicator(int size);
std::shared_ptr<Communicator> find_communicator(const std::string& number);

}  // namespace simulated
