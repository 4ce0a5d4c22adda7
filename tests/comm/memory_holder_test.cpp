#include "comm/memory_holder.hpp"

#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

namespace memory_holder_test {

using lockstep::comm::MemoryHolder;
using namespace std::chrono_literals;
namespace fs = std::filesystem;

constexpr size_t kMemory = 64 << 20;

fs::path folder_of(pid_t process) {
  return fs::path("/proc") / std::to_string(process);
}

size_t resident_bytes(pid_t process) {
  size_t size = 0, resident = 0;
  std::ifstream(folder_of(process) / "statm") >> size >> resident;
  return resident * static_cast<size_t>(getpagesize());
}

bool is_gone_soon(pid_t process) {
  for (const auto end = std::chrono::steady_clock::now() + 5s; std::chrono::steady_clock::now() < end;) {
    if (kill(process, 0) != 0 || resident_bytes(process) == 0) return true;  // or nobody has collected it yet
    std::this_thread::sleep_for(10ms);
  }
  return false;
}

// Until it has begun.
void wait_for(const MemoryHolder& holder) {
  for (int looks = 0; looks < 500 && !fs::is_empty(folder_of(holder.process()) / "fd"); ++looks)
    std::this_thread::sleep_for(10ms);
}

// A process with some memory that has a holder, says its number, and waits to be killed.
[[noreturn]] void be_killed(int connection) {
  const MemoryHolder holder;
  wait_for(holder);
  const std::vector<char> memory(kMemory, 1);
  const pid_t process = holder.process();
  if (write(connection, &process, sizeof process) != sizeof process) _exit(1);
  for (;;) pause();
}

class MemoryHolderTest : public testing::Test {
 protected:
  void SetUp() override {
    if (MemoryHolder().process() < 0) GTEST_SKIP() << "no second process here, as under ThreadSanitizer";
  }
};

TEST_F(MemoryHolderTest, HasTheMemoryOfAKilledProcessWhoseConnectionsAreClosed) {
  std::array<int, 2> connection{};
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, connection.data()), 0);
  const pid_t killed = fork();
  if (killed == 0) {
    close(connection[0]);
    be_killed(connection[1]);
  }
  close(connection[1]);
  pid_t holder = 0;
  ASSERT_EQ(read(connection[0], &holder, sizeof holder), static_cast<ssize_t>(sizeof holder));
  ASSERT_GT(holder, 0);
  kill(killed, SIGKILL);
  char nothing = 0;
  EXPECT_EQ(read(connection[0], &nothing, 1), 0);
  EXPECT_GE(resident_bytes(holder), kMemory) << "the memory was given back first";
  EXPECT_EQ(waitpid(killed, nullptr, 0), killed);
  EXPECT_TRUE(is_gone_soon(holder));
  close(connection[0]);
}

TEST_F(MemoryHolderTest, HasNoFileAndEndsWithTheObject) {
  pid_t process = 0;
  {
    const MemoryHolder holder;
    process = holder.process();
    ASSERT_GT(process, 0);
    wait_for(holder);
    EXPECT_TRUE(fs::is_empty(folder_of(process) / "fd"));
  }
  EXPECT_NE(kill(process, 0), 0);
}

TEST_F(MemoryHolderTest, IsNotEndedByWhatAsksItsProcessToEnd) {
  const MemoryHolder holder;
  wait_for(holder);
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2}) kill(holder.process(), signal);
  std::this_thread::sleep_for(200ms);
  EXPECT_GT(resident_bytes(holder.process()), 0U);
}

}  // namespace memory_holder_test
