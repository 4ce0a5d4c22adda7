// MemoryMeter: measures how many bytes of tensors a piece of code needed at most.
//
// While it lives, it counts what LibTorch's allocators, on the CPU and on GPUs, give to its thread and take back. It
// also counts for autograd's threads that work for its thread. So ranks that are threads of one process are told apart,
// which the process's memory could not do. Memory from before the meter does not count when it is freed. Memory that
// another thread frees stays counted. Meters nest, and a profiler around one goes on. Cost: a lock and an entry in a
// table per tensor.
#pragma once

#include <c10/util/ThreadLocalDebugInfo.h>

#include <cstdint>
#include <memory>

namespace lockstep {

class MemoryMeter {
 public:
  MemoryMeter();  // from here on, until it is destroyed on the same thread
  MemoryMeter(const MemoryMeter&) = delete;
  MemoryMeter& operator=(const MemoryMeter&) = delete;

  int64_t current() const;  // bytes that were allocated since and live now, of all devices together
  int64_t peak() const;     // the most that current() has been since the meter was made or reset_peak() was called
  void reset_peak();

 private:
  class Ledger;
  const std::shared_ptr<Ledger> ledger_;
  const c10::DebugInfoGuard guard_;
};

}  // namespace lockstep
