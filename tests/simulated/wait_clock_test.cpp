// Labels: simulated
// A WaitClock on a GPU: what holds up the rank's stream counts, and nothing else.
#include "trainer/wait_clock.hpp"

#include <c10/core/StreamGuard.h>
#include <gmock/gmock.h>
#include <torch/torch.h>

#include "devices/device_streams.hpp"
#include "support/simulated_device.hpp"

#include <chrono>
#include <thread>

namespace wait_clock_test {

namespace simulated = lockstep::simulated;

const c10::Device gpu("cuda:1");

class WaitClockOnAGpu : public testing::Test {
 protected:
  WaitClockOnAGpu() { clock_.start(); }

  void keep_busy(const c10::Stream& stream, int milliseconds) {
    simulated::queue(gpu.index(), stream.id(),
                     [=] { std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds)); });
  }
  // A call's wait, for something that lasts for 50 ms.
  void wait() {
    clock_.waits();
    keep_busy(lockstep::current_stream(gpu), 50);
    clock_.spent(10);  // the host's seconds are not the stream's
  }
  double seconds() {
    stream_.synchronize();
    return clock_.seconds();
  }

  const c10::Stream stream_ = lockstep::current_stream(gpu);
  lockstep::WaitClock clock_{gpu};
};

TEST_F(WaitClockOnAGpu, CountsWhatLiesBetweenTheBeginningAndTheEndOfWaits) {
  keep_busy(stream_, 200);
  wait();
  keep_busy(stream_, 200);
  wait();
  EXPECT_GE(seconds(), 0.1);
  EXPECT_LT(seconds(), 0.3);
  clock_.reset();
  EXPECT_EQ(seconds(), 0);
}

TEST_F(WaitClockOnAGpu, AWaitWithinAWaitCountsOnce) {
  clock_.hold();
  keep_busy(stream_, 50);
  wait();
  wait();
  clock_.release();
  EXPECT_GE(seconds(), 0.15);
  EXPECT_LT(seconds(), 0.25);
}

TEST_F(WaitClockOnAGpu, OtherStreamsWaitsHoldUpNoComputing) {
  {
    const c10::Stream other = lockstep::stream_beside(gpu);
    const c10::StreamGuard guard(other);
    wait();
  }
  clock_.pause();
  wait();
  EXPECT_EQ(seconds(), 0);
}

// Events are read before there are too many of them.
TEST_F(WaitClockOnAGpu, LongEpochsCountToo) {
  wait();
  for (int i = 0; i < 5000; ++i) {
    clock_.hold();
    clock_.release();
  }
  EXPECT_GE(seconds(), 0.05);
  EXPECT_LT(seconds(), 0.5);
}

}  // namespace wait_clock_test
