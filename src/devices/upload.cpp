#include "upload.hpp"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/index_select.h>
#include <c10/core/StreamGuard.h>

#include "device_streams.hpp"

#include <algorithm>
#include <utility>

namespace lockstep {

at::Tensor upload(const at::Tensor& tensor, const c10::Device& device) {
  if (!device.is_cuda() || !tensor.is_cpu()) return tensor.to(device);
  const at::Tensor staged = at::empty_like(tensor, tensor.options().pinned_memory(true));
  return staged.copy_(tensor).to(device, tensor.scalar_type(), /*non_blocking=*/true);
}

BatchUpload::BatchUpload(const c10::Device& gpu, at::Tensor order)
    : copies_(stream_beside(gpu)), order_(std::move(order)) {}

at::Tensor BatchUpload::rows(const at::Tensor& data, int64_t begin, int64_t size) {
  const std::lock_guard lock(mutex_);
  const auto found = std::find_if(started_.begin(), started_.end(), [&](const Copy& copy) {
    return copy.data.is_same(data) && copy.begin == begin && copy.size == size;
  });
  const Copy copy = found == started_.end() ? copy_of(data, begin, size) : std::move(*found);
  std::erase_if(started_, [&](const Copy& other) {
    return !other.data.defined() || (other.data.is_same(data) && (other.begin != begin || other.size != size));
  });
  const c10::Stream current = current_stream(copies_.device());
  copy.arrived.block(current);
  keep_for(copy.there, current);
  return copy.there;
}

void BatchUpload::start(const at::Tensor& data, int64_t begin, int64_t size) {
  const std::lock_guard lock(mutex_);
  started_.push_back(copy_of(data, begin, size));
}

BatchUpload::Copy BatchUpload::copy_of(const at::Tensor& data, int64_t begin, int64_t size) const {
  std::vector<int64_t> sizes = data.sizes().vec();
  sizes[0] = size;
  at::Tensor staged;
  if (order_.defined()) {
    staged = at::empty(sizes, data.options().pinned_memory(true));
    at::index_select_out(staged, data, 0, order_.narrow(0, begin, size));
  } else {
    const at::Tensor part = data.narrow(0, begin, size);
    staged = at::empty_like(part, part.options().pinned_memory(true)).copy_(part);
  }
  const c10::StreamGuard guard(copies_);
  Copy copy{data, begin, size, staged.to(copies_.device(), staged.scalar_type(), /*non_blocking=*/true),
            c10::Event(copies_.device_type())};
  copy.arrived.record(copies_);
  return copy;
}

}  // namespace lockstep
