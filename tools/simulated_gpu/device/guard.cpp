#include "guard.hpp"

#include <utility>

#include "graph.hpp"
#include "launch.hpp"
#include "memory.hpp"
#include "reports.hpp"
#include "settings.hpp"

namespace simulated {
namespace {

// An event is the point that it was last recorded at, in a stream.
struct Event {
  std::shared_ptr<Point> point;
  const Stream* stream = nullptr;
};

// Whether tasks were queued behind the event. They leave the device something to do while the host waits.
bool has_more_to_do(const Event& event) {
  const std::lock_guard lock(order());
  const auto tasks = [&](const Clock& clock) {
    const auto found = clock.find(event.stream->number);
    return found == clock.end() ? 0 : found->second;
  };
  return tasks(event.stream->clock) > tasks(event.point->clock);
}

std::shared_ptr<Point> point_of(void* event) {
  return event == nullptr ? nullptr : static_cast<Event*>(event)->point;
}

c10::Stream as_c10(int device, int64_t id) {
  return c10::Stream(c10::Stream::UNSAFE, device_at(device), id);
}

int index_of(c10::Device device) {
  return device.has_index() ? device.index() : current_device();
}

}  // namespace

c10::Device device_at(int index) {
  return {kType, static_cast<c10::DeviceIndex>(index)};
}

c10::Device Guard::exchangeDevice(c10::Device device) const {
  return device_at(std::exchange(current_device(), index_of(device)));
}

c10::Device Guard::getDevice() const {
  return device_at(current_device());
}

void Guard::setDevice(c10::Device device) const {
  current_device() = index_of(device);
}

void Guard::uncheckedSetDevice(c10::Device device) const noexcept {
  current_device() = index_of(device);
}

c10::DeviceIndex Guard::deviceCount() const noexcept {
  return static_cast<c10::DeviceIndex>(settings().devices);
}

c10::Stream Guard::getStream(c10::Device device) const {
  return as_c10(index_of(device), current_stream_id(index_of(device)));
}

c10::Stream Guard::getDefaultStream(c10::Device device) const {
  return as_c10(index_of(device), 0);
}

c10::Stream Guard::getStreamFromGlobalPool(c10::Device device, bool high_priority) const {
  const int index = index_of(device);
  return as_c10(index, simulated::device(index).next_of_pool(high_priority));
}

c10::Stream Guard::exchangeStream(c10::Stream stream) const {
  const int device = stream.device_index();
  return as_c10(device, std::exchange(current_stream_id(device), stream.id()));
}

bool Guard::queryStream(const c10::Stream& stream) const {
  return stream_of(stream).idle();
}

void Guard::synchronizeStream(const c10::Stream& stream) const {
  stream_of(stream).synchronize();
}

#if TORCH_VERSION_MINOR >= 15
bool Guard::isStreamCapturing(const c10::Stream& stream) const {
  return is_recorded(stream_of(stream));
}
#endif

void Guard::synchronizeDevice(c10::DeviceIndex index) const {
  ++counts().host_waits;
  {
    const std::lock_guard lock(order());
    Graph::check_wait(index);
  }
  for (const auto& stream : device(index).streams()) {
    if (!stream->idle()) stream->finish();
    const std::lock_guard lock(order());
    join(host_clock(), stream->clock);
  }
}

void Guard::recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const {
  allocator().recordStream(pointer, stream);
}

void Guard::record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const {
  if (*event == nullptr) *event = new Event;
  const std::lock_guard lock(order());
  *static_cast<Event*>(*event) = {stream_of(stream).mark(), &stream_of(stream)};
}

void Guard::block(void* event, const c10::Stream& stream) const {
  const auto point = point_of(event);
  if (!point) return;
  const std::lock_guard lock(order());
  stream_of(stream).follow(point);
}

// A host that has seen an event need not wait for it: that counts as a wait that took no time.
bool Guard::queryEvent(void* event) const {
  const auto point = point_of(event);
  if (!point) return true;
  Graph::check_wait(*point);
  if (!point->passed()) return false;
  const std::lock_guard lock(order());
  join(host_clock(), point->clock);
  return true;
}

void Guard::synchronizeEvent(void* event) const {
  const auto point = point_of(event);
  if (!point) return;
  ++(has_more_to_do(*static_cast<const Event*>(event)) ? counts().late_waits : counts().host_waits);
  Graph::check_wait(*point);
  point->wait();
  const std::lock_guard lock(order());
  join(host_clock(), point->clock);
}

double Guard::elapsedTime(void* from, void* to, c10::DeviceIndex) const {
  return std::chrono::duration<double, std::milli>(point_of(to)->time() - point_of(from)->time()).count();
}

void Guard::destroyEvent(void* event, c10::DeviceIndex) const noexcept {
  delete static_cast<Event*>(event);
}

C10_REGISTER_GUARD_IMPL(SIMULATED_TYPE, Guard)

}  // namespace simulated
