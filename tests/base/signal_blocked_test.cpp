#include "base/signals.hpp"

#include <gtest/gtest.h>

#include <array>
#include <cerrno>
#include <optional>

#include <sys/socket.h>
#include <unistd.h>

namespace signal_blocked_test {

using lockstep::SignalBlocked;

bool is_blocked() {
  sigset_t blocked;
  pthread_sigmask(SIG_SETMASK, nullptr, &blocked);
  return sigismember(&blocked, SIGPIPE) == 1;
}

bool is_pending() {
  sigset_t pending;
  sigpending(&pending);
  return sigismember(&pending, SIGPIPE) == 1;
}

int error_of_a_write_to_nobody() {
  std::array<int, 2> ends{};
  if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends.data()) != 0) return -1;
  close(ends[1]);
  errno = 0;
  const auto written = write(ends[0], "x", 1);
  const int error = written < 0 ? errno : 0;
  close(ends[0]);
  return error;
}

TEST(SignalBlocked, AWriteToAClosedConnectionFailsAndNothingIsLeft) {
  ASSERT_FALSE(is_blocked());
  {
    const SignalBlocked blocked(SIGPIPE);
    EXPECT_TRUE(is_blocked());
    EXPECT_EQ(error_of_a_write_to_nobody(), EPIPE);
    EXPECT_TRUE(is_pending());
  }
  EXPECT_FALSE(is_pending());  // had it stayed, this process would have ended
  EXPECT_FALSE(is_blocked());
}

TEST(SignalBlocked, WhatWasThereBeforeStays) {
  std::optional<SignalBlocked> outer(std::in_place, SIGPIPE);
  EXPECT_EQ(error_of_a_write_to_nobody(), EPIPE);
  { const SignalBlocked inner(SIGPIPE); }
  EXPECT_TRUE(is_blocked());
  EXPECT_TRUE(is_pending());
  outer.reset();
  EXPECT_FALSE(is_blocked());
}

}  // namespace signal_blocked_test
