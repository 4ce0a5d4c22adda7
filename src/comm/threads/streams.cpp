#include "streams.hpp"

#include <algorithm>

#include "devices/device_streams.hpp"

namespace lockstep::comm {
namespace {

c10::Event record(const c10::Stream& stream) {
  c10::Event event(stream.device_type());
  event.record(stream);
  return event;
}

}  // namespace

Streams::Streams(const Devices& devices) {
  for (const auto& device : devices) {
    const bool known =
        std::any_of(streams_.begin(), streams_.end(), [&](const auto& s) { return s.device() == device; });
    if (device.is_cpu() || known) continue;
    // The priority is high, so an exchange goes first wherever a computation leaves room. Ranks compute on streams of
    // the other pool, so this is never a rank's stream.
    streams_.push_back(stream_beside(device, /*high_priority=*/true));
  }
}

ReadyMark Streams::ready(const c10::Device& device) const {
  ReadyMark mark;
  if (!device.is_cpu()) mark.push_back(record(current_stream(device)));
  return mark;
}

void Streams::run_after(const std::vector<const ReadyMark*>& marks, const std::function<void()>& work) const {
  if (streams_.empty()) return work();
  for (const auto& stream : streams_) {
    for (const auto* mark : marks) {
      for (const auto& event : *mark) event.block(stream);
    }
  }
  const c10::MultiStreamGuard guard(streams_);
  work();
}

void Streams::keep(const at::Tensor& tensor) const {
  for (const auto& stream : streams_) {
    if (stream.device() == tensor.device()) keep_for(tensor, stream);
  }
}

DoneMark Streams::done() const {
  DoneMark mark;
  for (const auto& stream : streams_) mark.push_back(record(stream));
  return mark;
}

void Streams::wait(const DoneMark& mark, const c10::Device& device) const {
  for (const auto& event : mark) event.block(current_stream(device));
}

}  // namespace lockstep::comm
