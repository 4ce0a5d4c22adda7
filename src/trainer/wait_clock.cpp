#include "wait_clock.hpp"

#include "devices/device_streams.hpp"

#include <limits>

namespace lockstep {
namespace {

// Keeps so many holds before it looks at the first, so that a look rarely comes too early.
constexpr size_t kKeptHolds = 4096;

}  // namespace

void WaitClock::reset() {
  seconds_ = 0;
  holds_.clear();
}

void WaitClock::start() {
  if (!device_.is_cpu()) stream_ = current_stream(device_);
  depth_ = 0;
  in_wait_ = false;
  runs_ = true;
}

double WaitClock::seconds() {
  attempt([this] { read_those_that_are_done(); });
  return has_times_ ? seconds_ : std::numeric_limits<double>::quiet_NaN();
}

void WaitClock::hold() {
  if (device_.is_cpu() || !runs_ || depth_++ > 0) return;
  attempt([this] { began_ = mark(); });
}

void WaitClock::release() {
  if (device_.is_cpu() || !runs_ || --depth_ > 0) return;
  attempt([this] {
    holds_.emplace_back(std::move(*began_), mark());
    if (holds_.size() > kKeptHolds) read_those_that_are_done();
  });
}

void WaitClock::waits() {
  in_wait_ = runs_ && !device_.is_cpu() && current_stream(device_) == *stream_;
  if (in_wait_) hold();
}

void WaitClock::spent(double seconds) {
  if (device_.is_cpu() && runs_) seconds_ += seconds;
  if (std::exchange(in_wait_, false)) release();
}

c10::Event WaitClock::mark() const {
  c10::Event event(device_.type(), c10::EventFlag::BACKEND_DEFAULT);  // an event with its time
  event.record(*stream_);
  return event;
}

void WaitClock::read_those_that_are_done() {
  for (; !holds_.empty() && holds_.front().second.query(); holds_.pop_front()) {
    const auto& [came, went_on] = holds_.front();
    seconds_ += came.elapsedTime(went_on) / 1000;
  }
}

void WaitClock::attempt(const std::function<void()>& use_events) {
  if (!has_times_) return;
  try {
    use_events();
  } catch (const c10::Error&) {
    has_times_ = false;
    holds_.clear();
  }
}

}  // namespace lockstep
