#include "own_operators.hpp"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "guard.hpp"
#include "launch.hpp"
#include "memory.hpp"
#include "pinned.hpp"

namespace simulated {
namespace {

const c10::DispatchKeySet keys(c10::DispatchKey::SIMULATED_TYPE);

c10::OptionalDeviceGuard guard_of(std::optional<at::Device> device) {
  return c10::OptionalDeviceGuard(device && device->has_index() ? device : std::nullopt);
}

at::Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> type, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const auto guard = guard_of(device);
  return at::detail::empty_generic(sizes, &allocator(), keys, c10::dtype_or_default(type), format);
}

void wait_for(Stream& later, Stream& earlier) {
  if (&earlier == &later) return;
  const std::lock_guard lock(order());
  later.follow(earlier.mark());
}

// It copies as CUDA does: on the source's current stream, and both devices' current streams wait for each other.
void copy_between(const at::Tensor& source, const at::Tensor& target) {
  Stream &from = current_stream(source.get_device()), &to = current_stream(target.get_device());
  const View in(source.expand_as(target)), out(target);
  wait_for(from, to);
  launch(from, "copy", {{in, false}, {out, true}}, [in, out] { out.on_stream().copy_(in.on_stream()); });
  wait_for(to, from);
}

// For copies for which the host does not wait. It would be in the call only when the graph is recorded.
void check_not_recorded(const Stream& stream) {
  TORCH_CHECK(!is_recorded(stream),
              "Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the CPU ", "tensor is pinned");
}

// Pinned memory is read and written when the copy's turn comes, other memory while the host is in the call.
void copy_from_host(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  Stream& stream = current_stream(target.get_device());
  const View out(target);
  const bool pinned = is_pinned(source.const_data_ptr());
  if (!pinned && non_blocking) check_not_recorded(stream);
  const at::Tensor in = pinned ? source.detach() : source.detach().clone();
  launch(stream, "copy from the host", {{out, true}}, [in, out] { out.on_stream().copy_(in); });
  if (!non_blocking) stream.synchronize();
}

void copy_to_host(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  Stream& stream = current_stream(source.get_device());
  const View in(source);
  if (!is_pinned(target.const_data_ptr()) && non_blocking) check_not_recorded(stream);
  launch(stream, "copy to the host", {{in, false}}, [in, out = target.detach()] { out.copy_(in.on_stream()); });
  if (!non_blocking || !is_pinned(target.const_data_ptr())) stream.synchronize();
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  if (source.numel() == 0) return target;
  if (is_here(source) && is_here(target)) {
    copy_between(source, target);
  } else if (is_here(target)) {
    copy_from_host(source, target, non_blocking);
  } else {
    copy_to_host(source, target, non_blocking);
  }
  return target;
}

at::Tensor& copy(at::Tensor& target, const at::Tensor& source, bool non_blocking) {
  copy_from(source.expand_as(target), target, non_blocking);
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, false);
}

at::Scalar item(const at::Tensor& tensor) {
  const at::Tensor here = at::empty({}, tensor.options().device(at::kCPU));
  copy_from(tensor.reshape({}), here, false);
  return here.item();
}

const at::Tensor& resize(const at::Tensor& tensor, at::IntArrayRef sizes, std::optional<at::MemoryFormat>) {
  const auto offset = static_cast<size_t>(tensor.storage_offset());
  const size_t bytes = at::detail::computeStorageNbytesContiguous(sizes, tensor.itemsize(), offset);
  if (bytes > tensor.storage().nbytes()) {
    const c10::OptionalDeviceGuard guard(tensor.device());
    auto* const storage = tensor.storage().unsafeGetStorageImpl();
    const at::Tensor old = tensor.numel() > 0 ? tensor.clone() : at::Tensor();
    storage->set_data_ptr_noswap(allocator().allocate(bytes));
    storage->set_nbytes(bytes);
    if (old.defined()) copy_from(old, tensor, true);
  }
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return tensor;
}

at::Tensor& set_storage(at::Tensor& tensor, at::Storage source, int64_t offset, at::IntArrayRef sizes,
                        at::IntArrayRef strides) {
  return at::native::set_storage_cpu_(tensor, std::move(source), offset, sizes, strides);
}

void record_stream(at::Tensor& tensor, c10::Stream stream) {
  allocator().recordStream(tensor.storage().data_ptr(), stream);
}

}  // namespace

at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> type,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  const auto guard = guard_of(device);
  return at::detail::empty_strided_generic(sizes, strides, &allocator(), keys, c10::dtype_or_default(type));
}

TORCH_LIBRARY_IMPL(aten, SIMULATED_TYPE, library) {
  c10::SetAllocator(kType, &allocator());
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("view", &at::native::view);
  library.impl("view_as_real", &at::native::view_as_real);
  library.impl("_reshape_alias", &at::native::_reshape_alias);
  library.impl("resize_", &resize);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  library.impl("copy_", &copy);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("_local_scalar_dense", &item);
  library.impl("record_stream", &record_stream);
}

}  // namespace simulated
