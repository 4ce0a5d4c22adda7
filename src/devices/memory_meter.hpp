// MemoryMeter: measures how many bytes of tensors some code needed at most.
//
// A MemoryMeter counts what LibTorch's allocators, on the CPU and on GPUs, give to its thread and take back. Autograd's
// threads that work for its thread count, too. So ranks that are threads of one process are told apart, as the
// process's memory could not do. Memory from before the meter does not count when it is freed. Memory that another
// thread frees stays counted, unless a meter of that thread shares the ledger. Meters nest, and a profiler around one
// goes on. Cost: a lock and an entry in a table per tensor.
#pragma once

#include <c10/util/ThreadLocalDebugInfo.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>

namespace lockstep {

// MemoryLedger: notes the meter of each allocation. Let meters on threads that free each other's tensors share one.
// Thread-safe.
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
  void forget(const void* pointer);  // call with mutex_ held

  mutable std::mutex mutex_;  // guards the accounts too
  std::unordered_map<const void*, Entry> entries_;
};

class MemoryMeter {
 public:
  // Measures from here on. Destroy the meter on the thread that made it.
  explicit MemoryMeter(std::shared_ptr<MemoryLedger> ledger = std::make_shared<MemoryLedger>());
  MemoryMeter& operator=(MemoryMeter&&) = delete;

  int64_t current() const;  // bytes allocated since then that live now, of all devices together
  int64_t peak() const;     // the most that current() was since the meter was made or reset_peak() was called
  void reset_peak();

 private:
  class Listener;
  const std::shared_ptr<MemoryLedger> ledger_;
  const std::shared_ptr<MemoryLedger::Account> account_;
  const c10::DebugInfoGuard guard_;
};

}  // namespace lockstep
