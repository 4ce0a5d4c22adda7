// Labels: concurrency
// The watchdog of one process, whose store is in memory.
#include "comm/processes/watchdog.hpp"

#include <gmock/gmock.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <atomic>
#include <stdexcept>
#include <thread>

namespace watchdog_test {

using namespace lockstep;
using namespace std::chrono_literals;
using Clock = comm::Watchdog::Clock;

struct BreakableStore : c10d::HashStore {
  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    if (is_full) throw std::runtime_error("no more memory");
    if (is_gone) C10_THROW_ERROR(DistNetworkError, "the connection was closed");
    HashStore::set(key, value);
  }
  std::atomic<bool> is_full = false, is_gone = false;
};

struct WatchdogTest : testing::Test {
  static comm::Roster two_processes() {
    comm::Roster roster;
    roster.by_process.assign(2, Devices{torch::kCPU});
    return roster;
  }

  comm::Failure failure_within(Clock::duration time) {
    waits.sleep(time, [](bool failed) { return failed; });
    return waits.failure();
  }

  const c10::intrusive_ptr<BreakableStore> store = c10::make_intrusive<BreakableStore>();
  const comm::Roster roster = two_processes();
  comm::Board board{store, roster, 0, "the launcher"};
  comm::Waits waits;
  comm::CallLog log{roster.ranks_of(0), 2};
  comm::Watchdog watchdog{board, waits, log, roster, 0, {.long_wait = 0ms, .silence = {3s, 3s}}};
};

// The machine has been up for longer than a process may be silent.
TEST_F(WatchdogTest, AProcessThatHasNotBegunYetHasTimeToDoSo) {
  waits.begin({comm::OpenCall{.text = "barrier", .connects = true}, 100s}, {});
  watchdog.start([] {});
  EXPECT_TRUE(failure_within(1s).empty());
  EXPECT_TRUE(failure_within(20s).is(Error::death));
  EXPECT_THAT(waits.failure().data.ranks, testing::ElementsAre(1));
}

// Three processes, whose beats come late. The watchdog is that of the first.
struct LateBeats : testing::Test {
  static comm::Roster three_on(c10::DeviceType type) {
    comm::Roster roster;
    roster.by_process.assign(3, Devices{c10::Device(type, 0)});
    return roster;
  }

  // Shows another process's heart, every 50 ms for so long. Gives the failure that came.
  static std::string beat_for(Clock::duration time, const std::vector<comm::Board*>& boards,
                              std::chrono::milliseconds silence, const comm::Waits& waits) {
    static int64_t count = 0;
    for (const auto end = Clock::now() + time; Clock::now() < end; std::this_thread::sleep_for(50ms)) {
      ++count;
      for (auto* const board : boards) board->put_heartbeat({count, count, silence});
    }
    return waits.failure().text;
  }

  // Lets the others beat, and then the third one alone; gives how long it takes until the second counts as dead.
  static Clock::duration until_second_is_dead(c10::DeviceType type, const comm::SilenceRange& range, bool connects,
                                              std::chrono::milliseconds told) {
    const auto store = c10::make_intrusive<c10d::HashStore>();
    const comm::Roster roster = three_on(type);
    comm::Board board(store, roster, 0, "the launcher"), second(store, roster, 1, "the launcher"),
        third(store, roster, 2, "the launcher");
    comm::Waits waits;
    comm::CallLog log(roster.ranks_of(0), 3);
    comm::Watchdog watchdog(board, waits, log, roster, 0, {.long_wait = 0ms, .silence = range});
    waits.begin({comm::OpenCall{.text = "barrier", .connects = connects}, 100s}, {});
    second.begin({1, 0, told});
    third.begin({1, 0, told});
    watchdog.start([] {});
    EXPECT_EQ(beat_for(comm::SilenceLimit::kLearns + 500ms, {&second, &third}, told, waits), "");
    const auto begin = Clock::now();
    while (waits.failure().empty() && Clock::now() < begin + 40s) beat_for(20ms, {&third}, told, waits);
    EXPECT_THAT(waits.failure().data.ranks, testing::ElementsAre(1));
    return Clock::now() - begin;
  }
};

TEST_F(LateBeats, GiveAProcessMoreTimeWhileARankConnects) {
  EXPECT_GT(until_second_is_dead(torch::kCPU, {1s, 20s}, /*connects=*/true, 4s), 3500ms);
}

TEST_F(LateBeats, OfGpusProcessesAreWaitedForTwiceAsLong) {
  EXPECT_GT(until_second_is_dead(torch::kPrivateUse1, {1s, 20s}, /*connects=*/false, 1s), 1600ms);
}

TEST_F(WatchdogTest, WhatFailsIsTheStoreOrWhatItSays) {
  watchdog.start([] {});
  store->is_full = true;
  EXPECT_EQ(failure_within(20s).text,
            "watching over the other processes failed in that of rank 0 (cpu): no more memory");
}

TEST_F(WatchdogTest, AStoreThatDoesNotAnswerIsGone) {
  watchdog.start([] {});
  store->is_gone = true;
  EXPECT_EQ(failure_within(20s).text, "the launcher is gone: the store that it keeps does not answer");
}

}  // namespace watchdog_test
