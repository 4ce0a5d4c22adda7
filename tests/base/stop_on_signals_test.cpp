// Signals ask for a stop, whichever thread they come to, and afterwards act as before.
#include <gmock/gmock.h>
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>
#include <lockstep/base/stop_on_signals.hpp>

#include "support/error_of.hpp"
#include "support/time_limits.hpp"

#include <atomic>
#include <chrono>
#include <csignal>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

namespace stop_on_signals_test {

using lockstep::comes_true;
using lockstep::error_of;
using lockstep::Refused;
using lockstep::StopOnSignals;
using namespace std::chrono_literals;

// To the process, as a terminal or kill(1) does.
void send(int signal) {
  kill(getpid(), signal);
}

bool is_blocked(int signal) {
  sigset_t mask;
  pthread_sigmask(SIG_SETMASK, nullptr, &mask);
  return sigismember(&mask, signal) == 1;
}

TEST(StopOnSignals, ASignalAsksForAStop) {
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    const StopOnSignals signals;
    const auto token = signals.token();
    EXPECT_FALSE(token.stop_requested());
    send(signal);
    EXPECT_TRUE(comes_true([&] { return token.stop_requested(); })) << signal;
    EXPECT_EQ(signals.received(), signal);
  }
}

// LibTorch's threads are there before, where data were computed on first. They do not block the signals.
TEST(StopOnSignals, AlsoOfAThreadThatWasThereBefore) {
  std::atomic<bool> done = false;
  std::thread earlier([&] { comes_true([&] { return done.load(); }); });
  {
    const StopOnSignals signals;
    pthread_kill(earlier.native_handle(), SIGINT);
    EXPECT_TRUE(comes_true([&] { return signals.token().stop_requested(); }));
  }
  done = true;
  earlier.join();
}

std::atomic<int> own_handler = 0;

TEST(StopOnSignals, AfterwardsSignalsDoWhatTheyDidBefore) {
  const auto before = std::signal(SIGTERM, [](int signal) { own_handler = signal; });
  {
    const StopOnSignals signals;
    EXPECT_TRUE(is_blocked(SIGTERM));
    send(SIGTERM);
    EXPECT_TRUE(comes_true([&] { return signals.token().stop_requested(); }));
    EXPECT_EQ(own_handler, 0);
  }
  EXPECT_FALSE(is_blocked(SIGTERM));
  send(SIGTERM);
  EXPECT_EQ(own_handler, SIGTERM);
  std::signal(SIGTERM, before);
}

TEST(StopOnSignals, AnIgnoredSignalStaysIgnored) {
  const auto before = std::signal(SIGINT, SIG_IGN);
  const StopOnSignals signals;
  send(SIGINT);
  send(SIGTERM);
  EXPECT_TRUE(comes_true([&] { return signals.token().stop_requested(); }));
  EXPECT_EQ(signals.received(), SIGTERM);
  std::signal(SIGINT, before);
}

TEST(StopOnSignals, OneAtATime) {
  std::optional<StopOnSignals> signals(std::in_place);
  EXPECT_THAT(error_of([] { const StopOnSignals other; }), Refused());
  signals.reset();
  const StopOnSignals next;
}

// The waiter is busy with the first signal, and gets no more time for the second. The test forks a process, in which no
// other thread could take the second signal.
TEST(StopOnSignals, ASignalThatComesAtTheEndDoesNotEndTheProgram) {
  const pid_t child = fork();
  if (child == 0) {
    std::stop_token token;
    std::atomic<bool> may_end = false;
    std::thread later;
    {
      const StopOnSignals signals([&](int, int) { may_end.wait(false); });
      token = signals.token();
      send(SIGINT);
      comes_true([&] { return signals.received() == SIGINT; });
      send(SIGTERM);
      later = std::thread([&] {
        std::this_thread::sleep_for(100ms);
        may_end = true;
        may_end.notify_all();
      });
    }
    later.join();
    _exit(token.stop_requested() ? 0 : 3);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_FALSE(WIFSIGNALED(status)) << "by signal " << WTERMSIG(status);
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

// In a process of its own.
TEST(StopOnSignals, ASecondSignalEndsTheProgram) {
  const pid_t child = fork();
  if (child == 0) {
    std::vector<std::pair<int, int>> told;
    const StopOnSignals signals([&](int signal, int number) { told.emplace_back(signal, number); });
    send(SIGINT);
    comes_true([&] { return signals.token().stop_requested(); });
    if (told != std::vector<std::pair<int, int>>{{SIGINT, 1}}) _exit(3);
    send(SIGINT);  // within half a second
    std::this_thread::sleep_for(100ms);
    send(SIGTERM);
    std::this_thread::sleep_for(lockstep::kSlowdown * 10s);
    _exit(4);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFSIGNALED(status)) << status;
  EXPECT_EQ(WTERMSIG(status), SIGTERM);
}

}  // namespace stop_on_signals_test
