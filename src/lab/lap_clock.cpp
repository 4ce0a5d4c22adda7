#include "lap_clock.hpp"

#include "devices/device_streams.hpp"

#include <algorithm>
#include <chrono>
#include <numeric>

namespace lockstep {
namespace {

double seconds_on_the_wall() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

LapClock::Point LapClock::now() const {
  if (device_.is_cpu()) return {.seconds = clock_ ? clock_() : seconds_on_the_wall()};
  Point point;
  point.event.emplace(device_.type(), c10::EventFlag::BACKEND_DEFAULT);  // with its time
  point.event->record(current_stream(device_));
  return point;
}

void LapClock::start() {
  start_ = now();
}

void LapClock::drop() {
  start_.reset();
}

void LapClock::stop() {
  if (!start_) return;
  last_.emplace(std::move(*start_), now());
  start_.reset();
}

void LapClock::keep() {
  if (!last_) return;
  kept_.push_back(std::move(*last_));
  last_.reset();
}

double LapClock::seconds_of(const Lap& lap) {
  const auto& [start, end] = lap;
  if (!start.event) return end.seconds - start.seconds;
  end.event->synchronize();
  return start.event->elapsedTime(*end.event) / 1000;
}

double LapClock::take() {
  std::vector<double> seconds;
  for (const auto& lap : kept_) seconds.push_back(seconds_of(lap));
  kept_.clear();
  if (seconds.empty()) return 0;
  std::sort(seconds.begin(), seconds.end());
  const std::ptrdiff_t left_out = seconds.size() < 3 ? 0 : 1;
  const auto first = seconds.begin() + left_out, last = seconds.end() - left_out;
  return std::accumulate(first, last, 0.0) / static_cast<double>(last - first);
}

}  // namespace lockstep
