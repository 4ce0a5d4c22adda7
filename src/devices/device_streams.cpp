#include "device_streams.hpp"

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <map>
#include <mutex>
#include <tuple>

namespace lockstep {
namespace {

c10::impl::VirtualGuardImpl guard_of(const c10::Device& device) {
  return c10::impl::VirtualGuardImpl(device.type());
}

}  // namespace

c10::Stream current_stream(const c10::Device& device) {
  return guard_of(device).getStream(device);
}

c10::Stream stream_beside(const c10::Device& device, bool high_priority) {
  try {
    return guard_of(device).getStreamFromGlobalPool(device, high_priority);
  } catch (const c10::Error&) {  // the type has no pool: c10 throws
    return current_stream(device);
  }
}

c10::Stream stream_of_rank(const c10::Device& device, int number) {
  static std::mutex mutex;
  static std::map<std::tuple<c10::DeviceType, c10::DeviceIndex, int>, c10::Stream> streams;
  const std::lock_guard lock(mutex);
  const std::tuple rank(device.type(), device.index(), number);
  const auto known = streams.find(rank);
  return known != streams.end() ? known->second : streams.emplace(rank, stream_beside(device)).first->second;
}

void queue_after(const c10::Stream& earlier, const c10::Stream& later) {
  c10::Event event(earlier.device_type());
  event.record(earlier);
  event.block(later);
}

void keep_for(const at::Tensor& tensor, const c10::Stream& stream) {
  guard_of(stream.device()).recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
}

}  // namespace lockstep
