// The program's own parts, without the program: the bar's line, names of runs, wrapped text.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <pthread.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <future>
#include <string>
#include <thread>

#include "base/number_text.hpp"
#include "cli/child_processes.hpp"
#include "cli/memory_kills.hpp"
#include "cli/output.hpp"
#include "cli/progress_bar.hpp"
#include "cli/run_name.hpp"
#include "cli/text.hpp"
#include "support/scratch_folder.hpp"

namespace cli_parts_test {

using lockstep::Devices;
using lockstep::ScratchFolder;
using namespace lockstep::cli;
using testing::ElementsAre;

const Progress half{.label = "epoch  3/10", .done = 27136, .total = 60000, .seconds = 8.47, .note = "loss=0.512"};

TEST(MemoryKills, AreTakenByAsManyProcessesAsTheKernelHasKilled) {
  const ScratchFolder folder;
  const MemoryKills::Files files = {folder / "nothing", folder / "other", folder / "events", folder / "later"};
  folder.write("other", "oom_kill_disable 7\n");
  folder.write("events", "low 0\noom 4\noom_kill 5\noom_group_kill 0\n");
  folder.write("later", "oom_kill 9\n");
  MemoryKills kills(files);
  EXPECT_FALSE(kills.take());
  folder.write("later", "oom_kill 10\n");
  EXPECT_FALSE(kills.take());
  folder.write("events", "low 0\noom 6\noom_kill 7\noom_group_kill 0\n");
  EXPECT_TRUE(kills.take());
  EXPECT_TRUE(kills.take());
  EXPECT_FALSE(kills.take());
  EXPECT_FALSE(MemoryKills({folder / "nothing"}).take());
}

TEST(ProgressLine, LooksLikeTqdms) {
  EXPECT_EQ(progress_line(half, 85, true),
            "epoch  3/10  45%|████▌     | 27136/60000 [00:08<00:10, 3204 samples/s, loss=0.512]");
  EXPECT_EQ(progress_line(half, 85, false),
            "epoch  3/10  45%|####      | 27136/60000 [00:08<00:10, 3204 samples/s, loss=0.512]");
}

TEST(ProgressLine, UsesTheWidthThatThereIs) {
  EXPECT_EQ(progress_line(half, 87, false),
            "epoch  3/10  45%|#####       | 27136/60000 [00:08<00:10, 3204 samples/s, loss=0.512]");
  EXPECT_EQ(progress_line(half, 79, false),
            "epoch  3/10  45%|#   | 27136/60000 [00:08<00:10, 3204 samples/s, loss=0.512]");
  EXPECT_EQ(progress_line(half, 78, false), "epoch  3/10  45% 27136/60000 [00:08<00:10, 3204 samples/s, loss=0.512]");
  EXPECT_EQ(progress_line(half, 32, false), "epoch  3/10  45% 27136/60000 ");
  EXPECT_EQ(progress_line(half, 1, false), "");
  EXPECT_EQ(progress_line(half, 1000, false).find("| 27136"), 17u + 40u);  // a longer bar says no more
}

TEST(ProgressLine, KnowsBothEnds) {
  Progress progress = half;
  progress.done = 0;
  progress.seconds = 0;
  EXPECT_EQ(progress_line(progress, 67, false), "epoch  3/10   0% 0/60000 [00:00<?, ? samples/s, loss=0.512]");
  progress.done = 60000;
  progress.seconds = 3725;
  EXPECT_EQ(progress_line(progress, 85, true),
            "epoch  3/10 100%|██████████| 60000/60000 [1:02:05<00:00, 16 samples/s, loss=0.512]");
}

TEST(ProgressLine, CountsBytes) {
  EXPECT_EQ(progress_line({.label = "a.gz", .done = 12300000, .total = 24600000, .seconds = 2, .unit = Unit::bytes}, 64,
                          false),
            "a.gz  50%|######      | 12.3MB/24.6MB [00:02<00:02, 6.2 MB/s]");
  EXPECT_EQ(progress_line({.label = "a.gz", .done = 5000000, .seconds = 2, .unit = Unit::bytes}, 80, false),
            "a.gz 5.0MB [00:02, 2.5 MB/s]");
}

c10::Device cpu() {
  return c10::Device(c10::kCPU);
}

c10::Device cuda(int index) {
  return c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(index));
}

TEST(RunName, HasShortNamesForDevices) {
  EXPECT_EQ(short_name({cpu()}), "cpu");
  EXPECT_EQ(short_name({cpu(), cpu()}), "2xcpu");
  EXPECT_EQ(short_name({cuda(0)}), "cuda0");
  EXPECT_EQ(short_name({cuda(0), cuda(0)}), "2xcuda0");
  EXPECT_EQ(short_name({cuda(0), cuda(1), cuda(2), cuda(3)}), "cuda0-3");
  EXPECT_EQ(short_name({cuda(0), cuda(2)}), "cuda0+cuda2");
  EXPECT_EQ(short_name({cuda(1), cuda(1), cuda(0)}), "2xcuda1+cuda0");
}

TEST(RunName, IsLocalTimeModelAndDevicesAndUnique) {
  setenv("TZ", "UTC-1", 1);  // one hour ahead of UTC
  tzset();
  const ScratchFolder runs;
  const Devices devices(2, cpu());
  const std::time_t now = 1795253525;  // 2026-11-21 09:32:05 UTC
  const auto next = [&] { return new_run_name(runs.path(), now, "lenet", devices); };
  EXPECT_EQ(next(), "2026-11-21_10-32-05_lenet_2xcpu");
  std::filesystem::create_directory(runs / next());
  EXPECT_EQ(next(), "2026-11-21_10-32-05_lenet_2xcpu-2");
  std::filesystem::create_directory(runs / next());
  EXPECT_EQ(next(), "2026-11-21_10-32-05_lenet_2xcpu-3");
}

TEST(Text, ShowsNumbersAsShortAsTheyCanBeReadBack) {
  EXPECT_EQ(lockstep::number_text(0.2), "0.2");
  EXPECT_EQ(lockstep::number_text(0.123456789), "0.123456789");
  EXPECT_EQ(lockstep::number_text(1e-5), "1e-05");
  EXPECT_EQ(lockstep::number_text(3), "3");
}

TEST(Text, Wraps) {
  EXPECT_THAT(wrap("one two three", 7), ElementsAre("one two", "three"));
  EXPECT_THAT(wrap("one two three", 6), ElementsAre("one", "two", "three"));
  EXPECT_THAT(wrap("a-word-too-long b", 6), ElementsAre("a-word-too-long", "b"));
  EXPECT_THAT(wrap("one\ntwo", 80), ElementsAre("one", "two"));
}

TEST(Text, AlignsTables) {
  EXPECT_EQ(table({{"a", "1"}, {"long", "2"}}), "  a     1\n  long  2\n");
}

TEST(Text, LosesCallStacksAndNothingElse) {
  const std::string stack =
      "Exception raised from recvBytes at Utils.hpp:786 (most recent call first):\n"
      "frame #0: c10::Error::Error(c10::SourceLocation) + 0x9d (0x7f02 in libc10.so)\n"
      "frame #18: <unknown function> + 0x1098ec (0x7f02 in libc.so.6)\n";
  EXPECT_EQ(without_call_stacks("it failed\n" + stack + "; the run is kept"), "it failed\n; the run is kept");
  EXPECT_EQ(without_call_stacks("it failed\n" + stack), "it failed");
  EXPECT_EQ(without_call_stacks("two\nlines, a frame #1"), "two\nlines, a frame #1");
}

// The exit code is the request's, and not that of the signal that came when it was not heard.
TEST(ChildProcesses, AForcedStopEndsAsTheRequestSays) {
  using namespace std::chrono_literals;
  const ScratchFolder folder;
  LaunchMessages messages;
  ChildProcesses processes({.until_kill = 100ms, .until_term_when_stopped = 100ms}, messages);
  const std::string ready = folder / "ready";
  processes.start({"sh", "-c", "trap '' TERM; echo >'" + ready + "'; while :; do sleep 0.05; done"}, {}, 0);
  while (!std::filesystem::exists(ready)) std::this_thread::sleep_for(10ms);
  pthread_kill(pthread_self(), SIGTERM);
  const auto ending = processes.wait();
  EXPECT_EQ(ending.code, 128 + SIGTERM);
  EXPECT_TRUE(ending.by_request);
}

// poll() says that there is room as long as there is room for a byte.
TEST(Output, DoesNotWaitForATerminalThatNobodyReads) {
  using namespace std::chrono_literals;
  const int reader = posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC);
  ASSERT_TRUE(reader >= 0 && grantpt(reader) == 0 && unlockpt(reader) == 0);
  const int terminal = open(ptsname(reader), O_RDWR | O_NOCTTY | O_CLOEXEC);
  ASSERT_GE(terminal, 0);
  Output output(terminal);
  std::string written, read_back;
  auto writer = std::async(std::launch::async, [&] {
    for (int line = 0; line < 1000; ++line) {
      output.print(format("line %d ", line) + std::string(110, '.') + "\n");
      written += format("line %d ", line) + std::string(110, '.') + "\r\n";
    }
    EXPECT_FALSE(output.finish(20ms));
  });
  EXPECT_EQ(writer.wait_for(20s), std::future_status::ready);
  std::thread reads([&] {
    char buffer[4096];
    for (ssize_t size = 0; !read_back.ends_with("line 999 " + std::string(110, '.') + "\r\n");) {
      if ((size = read(reader, buffer, sizeof buffer)) <= 0) break;
      read_back.append(buffer, static_cast<size_t>(size));
    }
  });
  writer.wait();
  EXPECT_TRUE(output.finish(20s));
  reads.join();
  EXPECT_EQ(read_back, written) << "nothing is lost";
  close(terminal);
  close(reader);
}

// Kept text goes out in whole lines, into a pipe that holds a page.
TEST(Output, SendsKeptTextInWholeLines) {
  int ends[2] = {-1, -1};
  ASSERT_EQ(pipe2(ends, O_CLOEXEC), 0);
  fcntl(ends[0], F_SETPIPE_SZ, 4096);
  const std::string page(4096, 'x'), line = std::string(1499, '.') + "\n";
  ASSERT_EQ(write(ends[1], page.data(), page.size()), 4096);
  Output output(ends[1]);
  for (int i = 0; i < 4; ++i) output.print(line);
  std::string buffer(8192, ' ');
  ASSERT_EQ(read(ends[0], buffer.data(), buffer.size()), 4096);
  output.print("");
  EXPECT_EQ(read(ends[0], buffer.data(), buffer.size()), 3000);
  output.give_up();
  for (const int fd : ends) close(fd);
}

}  // namespace cli_parts_test
