#include "host_copy.hpp"

#include <ATen/ops/empty.h>

#include "device_streams.hpp"

namespace lockstep {

HostCopy::HostCopy(const at::Tensor& tensor) : values_(tensor.detach()) {
  const c10::Device device = tensor.device();
  if (device.is_cpu()) return;
  // The memory is pinned, since the host would wait for a copy to other memory.
  values_ = at::empty(tensor.sizes(), at::TensorOptions(tensor.scalar_type()).pinned_memory(true));
  values_.copy_(tensor.detach(), /*non_blocking=*/true);
  arrived_.emplace(device.type());
  arrived_->record(current_stream(device));
}

}  // namespace lockstep
