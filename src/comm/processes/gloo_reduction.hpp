// Reductions over a Gloo group, with what Gloo lacks: averages, some types, tensors without elements.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <chrono>
#include <functional>

namespace lockstep::comm {

// Gloo's own timeout is a little longer than the rank's, so that whoever waits gives up first and can say for whom it
// waited.
constexpr std::chrono::milliseconds kMargin{10'000};

struct Pending {
  c10::intrusive_ptr<c10d::Work> work;  // null: nothing to wait for
  std::function<void()> finish = {};    // once it is complete
};

// Also in place of calls that have nothing to move: a call that differs from it elsewhere must not go unnoticed.
Pending start_barrier(c10d::Backend& group, std::chrono::milliseconds timeout);

// Starts to reduce `flat`, one dimension and contiguous, in place over the members of `group`. An average is the sum
// divided by `ranks`, which may be more than the members. Equal bits on all members.
Pending start_allreduce(c10d::Backend& group, const at::Tensor& flat, c10d::ReduceOp::RedOpType op, int ranks,
                        std::chrono::milliseconds timeout);

// The same memory as bytes: Gloo moves those, whatever type they are of.
inline at::Tensor as_bytes(const at::Tensor& flat) {
  return flat.view(at::kByte);
}

}  // namespace lockstep::comm
