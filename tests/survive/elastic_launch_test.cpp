// ElasticLaunch: when the launcher of an elastic job takes a process for dead.
#include <gmock/gmock.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "survive/elastic_launch.hpp"

#include <chrono>
#include <thread>
#include <vector>

namespace lockstep {
namespace elastic_launch_test {

using comm::ElasticLaunch;
using comm::Generations;
using testing::ElementsAre;
using testing::IsEmpty;
using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

class AnElasticLaunch : public testing::Test {
 protected:
  // Looks again and again until somebody is late.
  std::vector<int> late_within(std::chrono::milliseconds time) {
    std::vector<int> late;
    for (const auto end = Clock::now() + time; late.empty() && Clock::now() < end; std::this_thread::sleep_for(10ms)) {
      const auto look = launch_.look();
      EXPECT_THAT(look.dead, IsEmpty());
      late = look.late;
    }
    return late;
  }

  const comm::StorePtr store_ = c10::make_intrusive<c10d::HashStore>();
  ElasticLaunch launch_{store_, "job", 2, 1, {.until_first_beat = 200ms}};
  Generations generations_{store_, "job"};
};

TEST_F(AnElasticLaunch, NobodyIsLateBeforeSomebodyHasBegun) {
  EXPECT_THAT(late_within(300ms), IsEmpty());
  generations_.take_part();
  EXPECT_THAT(late_within(300ms), IsEmpty());
}

TEST_F(AnElasticLaunch, OneThatTakesTwiceAsLongAsAnotherIsLate) {
  EXPECT_THAT(late_within(300ms), IsEmpty());
  generations_.take_part();
  generations_.beat(1, {.beats = 0, .silence = 60s, .most = 60s});
  EXPECT_THAT(launch_.look().late, IsEmpty()) << "it has not had twice the other's time";
  EXPECT_THAT(late_within(20s), ElementsAre(0));
  EXPECT_THAT(launch_.look().late, IsEmpty()) << "it is reported once";
}

// The launcher's own looks come in time, so that a second is enough; but not after it has slept.
TEST_F(AnElasticLaunch, AHeartThatStopsIsSeenAfterASecondUnlessTheLauncherSleptItself) {
  generations_.take_part();
  int64_t beats = 0;
  const auto beat_and_look = [&] {
    generations_.beat(1, {.beats = ++beats, .silence = 1s, .most = 6s});
    std::this_thread::sleep_for(10ms);
    EXPECT_THAT(launch_.look().dead, IsEmpty());
  };
  for (const auto end = Clock::now() + comm::SilenceLimit::kLearns + 300ms; Clock::now() < end;) beat_and_look();
  const auto dead_after = [&] {
    const auto begin = Clock::now();
    while (Clock::now() < begin + 20s && launch_.look().dead.empty()) std::this_thread::sleep_for(10ms);
    return Clock::now() - begin;
  };
  const auto first = dead_after();
  EXPECT_GT(first, 900ms);
  EXPECT_LT(first, 5500ms) << "unless this machine is very busy";
  beat_and_look();
  std::this_thread::sleep_for(1200ms);
  EXPECT_THAT(launch_.look().dead, IsEmpty()) << "it slept itself";
  EXPECT_GT(dead_after(), 2500ms) << "and others may do so for longer";
}

TEST_F(AnElasticLaunch, AHeartThatWasLateHasMoreTime) {
  generations_.take_part();
  for (int64_t beats = 1; beats < 100; ++beats) {
    generations_.beat(1, {.beats = beats, .silence = 2s, .most = 6s});
    std::this_thread::sleep_for(25ms);
    EXPECT_THAT(launch_.look().dead, IsEmpty());
  }
  for (const auto end = Clock::now() + 1500ms; Clock::now() < end; std::this_thread::sleep_for(10ms))
    EXPECT_THAT(launch_.look().dead, IsEmpty());
  const auto begin = Clock::now();
  while (Clock::now() < begin + 20s && launch_.look().dead.empty()) std::this_thread::sleep_for(10ms);
  EXPECT_LT(Clock::now() - begin, 19s);
}

TEST_F(AnElasticLaunch, OneThatIsKilledAfterTheOthersHaveEndedIsNoFailureUnlessItKeepsTheFiles) {
  const comm::ProcessEnd well{.failed = false, .stopped = false, .how = "it ended"};
  const comm::ProcessEnd killed{.failed = true, .stopped = false, .how = "it was killed"};
  generations_.take_part();
  generations_.note_beginning(0);
  ElasticLaunch other(store_, "other", 2, 1, {});
  launch_.note_end(0, well, /*killed=*/false);
  EXPECT_TRUE(launch_.note_end(1, killed, /*killed=*/true));
  other.note_end(1, well, /*killed=*/false);
  EXPECT_FALSE(other.note_end(0, killed, /*killed=*/true));
}

// One whose machine has too little memory for so many would be killed again and again.
TEST_F(AnElasticLaunch, OfProcessesThatLackedMemoryTheFirstAloneHasASuccessor) {
  const comm::ProcessEnd killed{.failed = true, .stopped = false, .how = "it was killed"};
  const comm::ProcessEnd lacked{.failed = true, .stopped = false, .how = "it was killed", .lacked_memory = true};
  ElasticLaunch launch(store_, "memory", 4, 5, {.until_start = 0ms});
  Generations(store_, "memory").take_part();
  const auto places_after = [&](int member, const comm::ProcessEnd& end) {
    EXPECT_TRUE(launch.note_end(member, end, /*killed=*/true));
    std::vector<int> places;
    for (const auto& start : launch.successors()) places.push_back(start.place);
    return places;
  };
  EXPECT_THAT(places_after(1, lacked), ElementsAre(1));
  EXPECT_THAT(launch.look().given_up, IsEmpty());
  EXPECT_THAT(places_after(2, lacked), IsEmpty());
  EXPECT_THAT(launch.look().given_up, ElementsAre(2));
  EXPECT_THAT(launch.look().given_up, IsEmpty()) << "it is reported once";
  EXPECT_THAT(places_after(3, killed), ElementsAre(3));
  EXPECT_FALSE(launch.lacks_successors());
}

}  // namespace elastic_launch_test
}  // namespace lockstep
