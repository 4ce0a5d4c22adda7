// LapClock: seconds between two points of what a device computes, without waiting for it.
//
// On the CPU by the clock on the wall: time in which another program has the core is time that the device lacks. On
// GPUs by events on the current stream, which are read when they are asked for. Used by one thread.
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
  // `clock`: seconds on the CPU, of a simulated one; empty: the clock on the wall.
  explicit LapClock(const c10::Device& device, std::function<double()> clock = {})
      : device_(device), clock_(std::move(clock)) {}

  void start();  // a lap, from here
  void drop();   // the lap that began
  void stop();   // nothing without a start
  void keep();   // the last lap that ended; nothing without one. One that is not kept before the next ends is dropped

  // Seconds of the kept laps without the slowest and the fastest of them, on average; 0 if there are none. Waits for
  // the device, and forgets them.
  double take();

 private:
  struct Point {
    double seconds = 0;                    // on the CPU
    std::optional<c10::Event> event = {};  // on GPUs
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
