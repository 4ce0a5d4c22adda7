// HostCopy: copies a tensor's values to the host, which goes on meanwhile.
//
//   HostCopy copy(sum);              // queued on the current stream
//   … a step later …
//   if (copy.arrival()) wait_for(rank, *copy.arrival());  // the device has the work queued since then to do meanwhile
//   copy.values().item<double>();
//
// item() would wait for all that is queued so far, and the device would then have nothing to do. Use it from one
// thread. On the CPU there is nothing to wait for, and no copy.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <optional>

namespace lockstep {

class HostCopy {
 public:
  // Do not change a tensor of the CPU before its values are read.
  explicit HostCopy(const at::Tensor& tensor);

  // Gives the event of the values' arrival, or null if they are there.
  const c10::Event* arrival() const { return arrived_ ? &*arrived_ : nullptr; }

  // Gives the values, on the CPU. Wait for their arrival first: until then this memory holds anything.
  const at::Tensor& values() const { return values_; }

 private:
  at::Tensor values_;
  std::optional<c10::Event> arrived_;  // the event of the values' arrival; null: they are there
};

}  // namespace lockstep
