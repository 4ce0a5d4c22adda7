// MemoryMeter: measures how many bytes of tensors a piece of code needed at most.
//
// While it lives, it counts what LibTorch's allocators, on the CPU and on GPUs, give to its thread and take back. It
// also counts for autograd's threads that work for its thread. So ranks that are threads of one process are told apart,
// which the process's memory could not do. Memory from before the meter does not count when it is freed. Memory that
// another thread frees stays counted, unless a meter of that thread shares the ledger. Meters nest, and a profiler
// around one goes on. Cost: a lock and an entry in a table per tensor.
#pragma once

#include <c10/util/ThreadLocalDebugInfo.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>

namespace lockstep {

// Whose memory is where: of one meter, or of several meters on threads that free each other's tensors. Thread-safe.
class MemoryLedger {
 public:
  struct Account {
    int64_t current = 0;
    int64_t peak = 0;
  };

  void allocated(const void* pointer, int64_t bytes, const std::shared_ptr<Account>& account);
  void freed(const void* pointer);
  Account read(const Account& account) const;
  void reset_peak(Account& account) const;

 private:
  struct Entry {
    std::shared_ptr<Account> account;
    int64_t bytes;
  };
  void forget(const void* pointer);  // under mutex_

  mutable std::mutex mutex_;  // also guards the accounts
  std::unordered_map<const void*, Entry> entries_;
};

class MemoryMeter {
 public:
  // From here on, until it is destroyed on the same thread.
  explicit MemoryMeter(std::shared_ptr<MemoryLedger> ledger = std::make_shared<MemoryLedger>());
  MemoryMeter(const MemoryMeter&) = delete;
  MemoryMeter& operator=(const MemoryMeter&) = delete;

  int64_t current() const;  // bytes that were allocated since and live now, of all devices together
  int64_t peak() const;     // the most that current() has been since the meter was made or reset_peak() was called
  void reset_peak();

 private:
  class Listener;
  const std::shared_ptr<MemoryLedger> ledger_;
  const std::shared_ptr<MemoryLedger::Account> account_;
  const c10::DebugInfoGuard guard_;
};

}  // namespace lockstep
