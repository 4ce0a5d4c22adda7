#include "memory_meter.hpp"

#include <c10/core/Allocator.h>

#include <algorithm>
#include <utility>

namespace lockstep {
namespace {

// Gives the key under which LibTorch's allocators look for a listener. (Its value is a global of LibTorch's.)
c10::DebugInfoKind place() {
  return c10::DebugInfoKind::PROFILER_STATE;
}

// Gives the listener before this one: a profiler, or a meter around this one. It outlives this one.
c10::MemoryReportingInfoBase* outer() {
  return dynamic_cast<c10::MemoryReportingInfoBase*>(c10::ThreadLocalDebugInfo::get(place()));
}

}  // namespace

// If a pointer is given out twice, its memory was freed where no meter saw the call.
void MemoryLedger::allocated(const void* pointer, int64_t bytes, const std::shared_ptr<Account>& account) {
  const std::lock_guard lock(mutex_);
  forget(pointer);
  entries_.insert({pointer, {account, bytes}});
  account->current += bytes;
  account->peak = std::max(account->peak, account->current);
}

void MemoryLedger::freed(const void* pointer) {
  const std::lock_guard lock(mutex_);
  forget(pointer);
}

void MemoryLedger::forget(const void* pointer) {
  const auto found = entries_.find(pointer);
  if (found == entries_.end()) return;
  found->second.account->current -= found->second.bytes;
  entries_.erase(found);
}

MemoryLedger::Account MemoryLedger::read(const Account& account) const {
  const std::lock_guard lock(mutex_);
  return account;
}

void MemoryLedger::reset_peak(Account& account) const {
  const std::lock_guard lock(mutex_);
  account.peak = account.current;
}

// The allocators call the listener on several threads.
class MemoryMeter::Listener : public c10::MemoryReportingInfoBase {
 public:
  Listener(std::shared_ptr<MemoryLedger> ledger, std::shared_ptr<MemoryLedger::Account> account)
      : ledger_(std::move(ledger)), account_(std::move(account)) {}

  void reportMemoryUsage(void* pointer, int64_t bytes, size_t allocated, size_t reserved, c10::Device device) override {
    if (outer_ != nullptr && outer_->memoryProfilingEnabled()) {
      outer_->reportMemoryUsage(pointer, bytes, allocated, reserved, device);
    }
    if (bytes > 0) {
      ledger_->allocated(pointer, bytes, account_);
    } else {
      ledger_->freed(pointer);
    }
  }

  bool memoryProfilingEnabled() const override { return true; }

 private:
  c10::MemoryReportingInfoBase* const outer_ = outer();
  const std::shared_ptr<MemoryLedger> ledger_;
  const std::shared_ptr<MemoryLedger::Account> account_;
};

MemoryMeter::MemoryMeter(std::shared_ptr<MemoryLedger> ledger)
    : ledger_(std::move(ledger)),
      account_(std::make_shared<MemoryLedger::Account>()),
      guard_(place(), std::make_shared<Listener>(ledger_, account_)) {}

int64_t MemoryMeter::current() const {
  return ledger_->read(*account_).current;
}

int64_t MemoryMeter::peak() const {
  return ledger_->read(*account_).peak;
}

void MemoryMeter::reset_peak() {
  ledger_->reset_peak(*account_);
}

}  // namespace lockstep
