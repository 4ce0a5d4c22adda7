// HostCopy: a tensor's values for the host, which are on their way while it goes on.
//
//   HostCopy copy(sum);              // queued on the current stream
//   … a step later …
//   if (copy.arrival()) wait_for(rank, *copy.arrival());  // the device has the work queued since then to do meanwhile
//   copy.values().item<double>();
//
// item() would wait for all that is queued so far, and the device would then have nothing to do. Used by one thread. On
// the CPU there is nothing to wait for, and no copy.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <optional>

namespace lockstep {

class HostCopy {
 public:
  // Do not change a tensor of the CPU until its values were read.
  explicit HostCopy(const at::Tensor& tensor);

  // When they are there; null: they are.
  const c10::Event* arrival() const { return arrived_ ? &*arrived_ : nullptr; }

  // On the CPU. Whoever has not waited for their arrival reads whatever lies there.
  const at::Tensor& values() const { return values_; }

 private:
  at::Tensor values_;
  std::optional<c10::Event> arrived_;  // null: they are there
};

}  // namespace lockstep
