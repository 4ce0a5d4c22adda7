// LapClock: measures how long a device computes between two points, without waiting for it.
//
// On the CPU it uses the clock on the wall: the device lacks the time in which another program has the core. On GPUs it
// uses events on the current stream, and reads them when they are asked for. Used by one thread.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>

#include <functional>
#include <optional>
#include <utility>
#include <vector>

namespace lockstep {

class LapClock {
 public:
  // `clock` gives seconds of a simulated clock, for the CPU. Empty: the clock on the wall.
  explicit LapClock(const c10::Device& device, std::function<double()> clock = {})
      : device_(device), clock_(std::move(clock)) {}

  void start();  // begins a lap
  void drop();   // forgets the lap that began
  void stop();   // ends the lap; does nothing without a start
  void keep();   // keeps the last lap that ended, if any; without keep() the next one replaces it

  // The mean seconds of the kept laps, without the slowest and the fastest; 0 if there are none. Waits for the device,
  // and forgets these laps.
  double take();

 private:
  struct Point {
    double seconds = 0;                    // on the CPU
    std::optional<c10::Event> event = {};  // present on GPUs
  };
  using Lap = std::pair<Point, Point>;

  Point now() const;
  static double seconds_of(const Lap& lap);

  const c10::Device device_;
  const std::function<double()> clock_;
  std::optional<Point> start_;
  std::optional<Lap> last_;
  std::vector<Lap> kept_;
};

}  // namespace lockstep
