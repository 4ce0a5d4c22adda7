// WaitClock measures how long a rank is held up by its calls to other ranks. The rest of the time the rank computes.
//
// On the CPU these are the seconds that its thread spends in calls. On a GPU the host does not see the waits: the
// stream waits there. So two events of the stream stand around each wait, and the time between them is read later, when
// both are done. No step waits for that. Use it from the rank's thread, and from autograd's in that rank's backward.
// Cost: two readings of the clock per call; on a GPU also two events per wait, and as many to be read.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include "ranks/observed_backend.hpp"

#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <utility>

namespace lockstep {

class WaitClock : public CallObserver {
 public:
  explicit WaitClock(const c10::Device& device) : device_(device) {}

  void reset();  // forgets all times
  void start();  // goes on measuring, on a GPU the current stream's waits
  void pause() { runs_ = false; }

  // Gives the seconds waited since reset(). On a GPU wait for the stream first. NaN: the device's events tell no times.
  double seconds();

  // Call these around a hold of a GPU's stream that is no call's wait. They may be nested.
  void hold();
  void release();

  void posts(c10d::OpType, int64_t, int) override {}
  void spent(double seconds) override;
  void waits() override;

 private:
  using Hold = std::pair<c10::Event, c10::Event>;  // when the stream comes to a wait, and when it goes on

  c10::Event mark() const;
  void read_those_that_are_done();
  void attempt(const std::function<void()>& use_events);  // some types of devices refuse events

  const c10::Device device_;
  bool runs_ = false;
  double seconds_ = 0;
  std::optional<c10::Stream> stream_;  // a GPU's stream; other streams' waits hold up no computing
  bool in_wait_ = false;               // a call waits now
  int depth_ = 0;                      // open calls of hold()
  std::optional<c10::Event> began_;    // start of the outermost hold
  std::deque<Hold> holds_;             // holds that are not read yet
  bool has_times_ = true;
};

}  // namespace lockstep
