#include "memory_meter.hpp"

#include <c10/core/Allocator.h>

#include <algorithm>
#include <mutex>
#include <unordered_map>

namespace lockstep {
namespace {

// The key under which LibTorch's allocators look for a listener. (Not a constant: its value is a global of LibTorch's.)
c10::DebugInfoKind place() {
  return c10::DebugInfoKind::PROFILER_STATE;
}

// The listener before this one: a profiler, or a meter around this one. It outlives this one.
c10::MemoryReportingInfoBase* outer() {
  return dynamic_cast<c10::MemoryReportingInfoBase*>(c10::ThreadLocalDebugInfo::get(place()));
}

}  // namespace

// Called by the allocators, on several threads.
class MemoryMeter::Ledger : public c10::MemoryReportingInfoBase {
 public:
  void reportMemoryUsage(void* pointer, int64_t bytes, size_t allocated, size_t reserved, c10::Device device) override {
    if (outer_ != nullptr && outer_->memoryProfilingEnabled()) {
      outer_->reportMemoryUsage(pointer, bytes, allocated, reserved, device);
    }
    const std::lock_guard lock(mutex_);
    // A pointer that is given out once more was freed where no meter saw it.
    if (const auto found = sizes_.find(pointer); found != sizes_.end()) {
      current_ -= found->second;
      sizes_.erase(found);
    }
    if (bytes <= 0) return;
    sizes_[pointer] = bytes;
    current_ += bytes;
    peak_ = std::max(peak_, current_);
  }

  bool memoryProfilingEnabled() const override { return true; }

  int64_t current() const {
    const std::lock_guard lock(mutex_);
    return current_;
  }
  int64_t peak() const {
    const std::lock_guard lock(mutex_);
    return peak_;
  }
  void reset_peak() {
    const std::lock_guard lock(mutex_);
    peak_ = current_;
  }

 private:
  c10::MemoryReportingInfoBase* const outer_ = outer();
  mutable std::mutex mutex_;
  std::unordered_map<const void*, int64_t> sizes_;
  int64_t current_ = 0;
  int64_t peak_ = 0;
};

MemoryMeter::MemoryMeter() : ledger_(std::make_shared<Ledger>()), guard_(place(), ledger_) {}

int64_t MemoryMeter::current() const {
  return ledger_->current();
}

int64_t MemoryMeter::peak() const {
  return ledger_->peak();
}

void MemoryMeter::reset_peak() {
  ledger_->reset_peak();
}

}  // namespace lockstep
