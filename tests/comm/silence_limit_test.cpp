// SilenceLimit: short where beats are in time, longer where they are late. Its clock is made up.
#include "comm/silence_limit.hpp"

#include <gmock/gmock.h>

namespace silence_limit_test {

using namespace lockstep;
using namespace std::chrono_literals;
using comm::SilenceLimit;
using Clock = SilenceLimit::Clock;

class ASilenceLimit : public testing::Test {
 protected:
  // Beats come every `pause` for so long.
  void beat_for(Clock::duration time, Clock::duration pause) {
    for (const auto end = now_ + time; now_ < end;) limit_.beat(now_ += pause);
  }

  Clock::time_point now_{100h};  // the machine has been up for long
  SilenceLimit limit_{comm::kSilence};
};

TEST_F(ASilenceLimit, IsTheLongestUntilGapsAreKnown) {
  EXPECT_EQ(limit_.limit(), 6s);
  beat_for(1900ms, 50ms);
  EXPECT_EQ(limit_.limit(), 6s);
}

TEST_F(ASilenceLimit, IsASecondOnAQuietMachine) {
  beat_for(3s, 50ms);
  EXPECT_EQ(limit_.limit(), 1s);
  beat_for(1s, 250ms);
  EXPECT_EQ(limit_.limit(), 1s);
}

TEST_F(ASilenceLimit, FollowsTheLongestGapAndForgetsIt) {
  beat_for(3s, 50ms);
  limit_.beat(now_ += 700ms);
  EXPECT_EQ(limit_.limit(), 2800ms);
  limit_.beat(now_ += 1200ms);
  EXPECT_EQ(limit_.limit(), 4800ms);
  beat_for(19s, 50ms);
  EXPECT_EQ(limit_.limit(), 4800ms) << "it is still remembered";
  beat_for(22s, 50ms);
  EXPECT_EQ(limit_.limit(), 1s);
}

TEST_F(ASilenceLimit, IsNeverAboveTheMost) {
  beat_for(3s, 50ms);
  limit_.beat(now_ += 30s);
  EXPECT_EQ(limit_.limit(), 6s);
}

TEST(SilenceRange, OfAGivenTimeIsFixed) {
  SilenceLimit limit(comm::silence_range(3s));
  Clock::time_point now{100h};
  EXPECT_EQ(limit.limit(), 3s);
  for (int beat = 0; beat < 100; ++beat) limit.beat(now += 50ms);
  EXPECT_EQ(limit.limit(), 3s);
  limit.beat(now += 10s);
  EXPECT_EQ(limit.limit(), 3s);
  EXPECT_EQ(comm::silence_range(0ms).least, 1s);
}

}  // namespace silence_limit_test
