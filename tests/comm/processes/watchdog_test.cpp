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
using testing::HasSubstr;
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

  std::string failure_within(Clock::duration time) {
    waits.sleep(time, [](bool failed) { return failed; });
    return waits.failure().text;
  }

  const c10::intrusive_ptr<BreakableStore> store = c10::make_intrusive<BreakableStore>();
  const comm::Roster roster = two_processes();
  comm::Board board{store, roster, 0, "the launcher", /*keep_going=*/false};
  comm::Waits waits;
  comm::CallLog log{roster.ranks_of(0), 2};
  comm::Watchdog watchdog{board, waits, log, roster, 0, {.long_wait = 0ms, .silence = {3s, 3s}}};
};

// The machine has been up for longer than a process may be silent.
TEST_F(WatchdogTest, AProcessThatHasNotBegunYetHasTimeToDoSo) {
  waits.begin({comm::OpenCall{.text = "barrier", .connects = true}, 100s}, {});
  watchdog.start([] {});
  EXPECT_EQ(failure_within(1s), "");
  EXPECT_THAT(failure_within(20s), HasSubstr("the process of rank 1 (cpu) is gone"));
}

TEST_F(WatchdogTest, WhatFailsIsTheStoreOrWhatItSays) {
  watchdog.start([] {});
  store->is_full = true;
  EXPECT_EQ(failure_within(20s), "watching over the other processes failed in that of rank 0 (cpu): no more memory");
}

TEST_F(WatchdogTest, AStoreThatDoesNotAnswerIsGone) {
  watchdog.start([] {});
  store->is_gone = true;
  EXPECT_EQ(failure_within(20s), "the launcher is gone: the store that it keeps does not answer");
}

}  // namespace watchdog_test
