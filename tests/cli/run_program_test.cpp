// lockstep-bench starts other programs, and says how they failed.
#include "bench/run_program.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <filesystem>

#include "support/error_of.hpp"
#include "support/scratch_folder.hpp"

namespace lockstep::cli {
namespace run_program_test {

using namespace std::chrono_literals;

TEST(RunProgram, GivesNoInputAndTakesOutput) {
  EXPECT_EQ(run_program({"cat"}, 10s), "");
  const std::string much(3'000'000, '\0');  // more than any pipe holds
  EXPECT_EQ(run_program({"head", "-c", std::to_string(much.size()), "/dev/zero"}, 10s), much);
}

TEST(RunProgram, PassesArgumentsWithoutAShell) {
  EXPECT_EQ(run_program({"printf", "%s|", "a b", "$HOME", "`ls`", ""}, 10s), "a b|$HOME|`ls`||");
}

TEST(RunProgram, NamesTheProgramThatFails) {
  auto error = [](const std::vector<std::string>& arguments) { return error_of([&] { run_program(arguments, 10s); }); };
  EXPECT_THAT(error({"no-such-program"}), Fails(Error::machine));
  EXPECT_THAT(error({"/"}), Fails(Error::machine));
  EXPECT_THAT(error({"sh", "-c", "echo why >&2; exit 4"}), Fails(Error::machine));
  EXPECT_THAT(error({"sh", "-c", "kill -KILL $$"}), Fails(Error::machine));
}

TEST(RunProgram, WorksWhereSigchldIsIgnored) {
  for (const int flags : {0, SA_NOCLDWAIT}) {
    struct sigaction ignored {
    }, before{};
    ignored.sa_handler = flags == 0 ? SIG_IGN : SIG_DFL;
    ignored.sa_flags = flags;
    sigaction(SIGCHLD, &ignored, &before);
    EXPECT_EQ(run_program({"echo", "it", "works"}, 10s), "it works\n");
    EXPECT_THAT(error_of([] { run_program({"sh", "-c", "echo why >&2; exit 4"}, 10s); }), Fails(Error::machine));
    sigaction(SIGCHLD, &before, nullptr);
  }
}

TEST(RunProgram, KillsAProgramThatHangsAndItsChildren) {
  ScratchFolder folder;
  std::string script = "sleep 60 & echo $! > '" + (folder / "pid").string() + "'; wait";
  auto start = std::chrono::steady_clock::now();
  EXPECT_THAT(error_of([&] { run_program({"sh", "-c", script}, 500ms); }), Fails(Error::machine));
  EXPECT_LT(std::chrono::steady_clock::now() - start, 30s);
  pid_t sleeper = std::stoi(folder.read("pid"));
  // Gone, or dead and waiting for init to notice.
  bool dead = false;
  for (int i = 0; i < 200 && !dead; ++i) {
    std::ifstream in("/proc/" + std::to_string(sleeper) + "/stat");
    std::string stat(std::istreambuf_iterator<char>(in), {});
    dead = stat.empty() || stat.find(") Z") != std::string::npos;
    usleep(10'000);
  }
  EXPECT_TRUE(dead);
}

// Threads of a program that trains may block or ignore signals; whatever they start must not inherit that.
TEST(RunProgram, LetsSignalsThrough) {
  sigset_t blocked, old;
  sigemptyset(&blocked);
  sigaddset(&blocked, SIGTERM);
  pthread_sigmask(SIG_BLOCK, &blocked, &old);
  auto old_handler = signal(SIGPIPE, SIG_IGN);
  std::string status = run_program({"cat", "/proc/self/status"}, 10s);
  signal(SIGPIPE, old_handler);
  pthread_sigmask(SIG_SETMASK, &old, nullptr);
  auto contains = [&](const std::string& key, int signal) {
    uint64_t set = std::stoull(status.substr(status.find(key) + key.size()), nullptr, 16);
    return (set >> (signal - 1) & 1) != 0;
  };
  EXPECT_FALSE(contains("SigBlk:", SIGTERM));
  EXPECT_FALSE(contains("SigIgn:", SIGPIPE));
}

}  // namespace run_program_test
}  // namespace lockstep::cli
