// These reductions over a Gloo group have what Gloo lacks: averages, some types, tensors without elements.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <chrono>
#include <functional>

namespace lockstep::comm {

// Let Gloo's own timeout end no call, since the timeout goes on while the process stands still. The watchdog ends calls
// that are late: a failure of the run closes their connections, which ends what is open then (GroupMember::close). A
// later call may be queued behind calls that never end, so look for a failure before waiting.
constexpr std::chrono::milliseconds kUntilItComes = std::chrono::hours(24 * 365);
constexpr std::chrono::milliseconds kUntilClosed{2'000};  // the longest wait once there is a failure

struct Pending {
  c10::intrusive_ptr<c10d::Work> work;
  std::function<void()> finish = {};  // call it once the work is complete
};

// Use it also in place of calls that have nothing to move, so that a call that differs on another rank is noticed.
Pending start_barrier(c10d::Backend& group);

// Tells whether start_allreduce() takes values of this type.
bool reduces(at::ScalarType type, c10d::ReduceOp::RedOpType op);

// Starts to reduce `flat`, of one dimension and contiguous, in place over the members of `group`. All members get equal
// bits.
Pending start_allreduce(c10d::Backend& group, const at::Tensor& flat, c10d::ReduceOp::RedOpType op);

// Gives the same memory as bytes, since Gloo moves bytes of any type.
inline at::Tensor as_bytes(const at::Tensor& flat) {
  return flat.view(at::kByte);
}

}  // namespace lockstep::comm
