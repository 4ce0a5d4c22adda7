#include "upload.hpp"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/index_select.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>

#include "device_streams.hpp"

#include <vector>

namespace lockstep {

at::Tensor upload(const at::Tensor& tensor, const c10::Device& device) {
  if (!device.is_cuda() || !tensor.is_cpu()) return tensor.to(device);
  const at::Tensor staged = at::empty_like(tensor, tensor.options().pinned_memory(true));
  return staged.copy_(tensor).to(device, tensor.scalar_type(), /*non_blocking=*/true);
}

BatchUpload::BatchUpload(const c10::Device& gpu) : copies_(stream_beside(gpu)) {}

at::Tensor BatchUpload::rows(const at::Tensor& data, int64_t begin, int64_t size, const at::Tensor& order) const {
  std::vector<int64_t> sizes = data.sizes().vec();
  sizes[0] = size;
  at::Tensor staged;
  if (order.defined()) {
    staged = at::empty(sizes, data.options().pinned_memory(true));
    at::index_select_out(staged, data, 0, order.narrow(0, begin, size));
  } else {
    const at::Tensor part = data.narrow(0, begin, size);
    staged = at::empty_like(part, part.options().pinned_memory(true)).copy_(part);
  }
  const c10::Device gpu = copies_.device();
  at::Tensor there;
  c10::Event arrived(gpu.type());
  {
    const c10::StreamGuard guard(copies_);
    there = staged.to(gpu, staged.scalar_type(), /*non_blocking=*/true);
    arrived.record(copies_);
  }
  const c10::Stream current = current_stream(gpu);
  arrived.block(current);
  keep_for(there, current);
  return there;
}

}  // namespace lockstep
