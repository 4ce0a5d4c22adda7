// Labels: processes
// Processes that do not belong together, or cannot meet: each is told so before the run begins, with what to do.
#include "timed_job.hpp"

#include <chrono>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace start_failures_test {

using namespace lockstep;
using namespace std::chrono_literals;
using testing::AllOf;
using testing::AnyOf;
using testing::ContainsRegex;
using testing::HasSubstr;
using testing::Not;

TEST(StartFailures, AnotherConfigurationIsRefusedWithBothShown) {
  const auto [job, took] = timed(3, {"is_configured_otherwise"});
  EXPECT_EQ(job.code, 3);
  EXPECT_THAT(job.err, AllFail(3, Error::difference));
  EXPECT_THAT(job.err, AllOf(HasSubstr("timeout 77 s"), HasSubstr("timeout 88 s"), Not(HasSubstr("LibTorch"))));
}

// A copy of the program whose build ID has another first byte.
void write_another_build(const std::filesystem::path& file) {
  std::string program = whole_file(ranks_program());
  const std::string note("\3\0\0\0GNU\0", 8);  // NT_GNU_BUILD_ID, of GNU
  const size_t begin = program.find(note);
  ASSERT_NE(begin, program.npos) << "the linker wrote no build ID";
  program[begin + note.size()] ^= 1;
  std::ofstream(file, std::ios::binary) << program;
  std::filesystem::permissions(file, std::filesystem::perms::owner_all);
}

TEST(StartFailures, AnotherBuildOfTheProgramIsRefusedWithBothShown) {
  const ScratchFolder folder;
  const auto other = folder / "process_ranks";
  write_another_build(other);
  const Words words = with_rank_1_doing("exec '" + other.string() + "' \"$@\"", {ranks_program(), "collectives"});
  const auto refused = run_program(words, surroundings_with());
  EXPECT_EQ(refused.code, 3);
  for (const char* process : {"process 0", "process 1"}) {
    EXPECT_THAT(refused.err, ContainsRegex(std::string(process) +
                                           ": process 1 runs another program or configuration than process 0: build "
                                           "[0-9a-f]{16}; process 0: build [0-9a-f]{16}[.].* set "
                                           "LOCKSTEP_MIXED_BUILDS=1 for all\n"));
  }
  expect_all_ok(run_program(words, surroundings_with({"LOCKSTEP_MIXED_BUILDS=1"})), 2);
}

// Started by hand, each as one that knows of no other.
TEST(StartFailures, ASecondJobAtTheSamePortIsRefusedAndTheFirstGoesOn) {
  const std::string port = free_port();
  const Words lives = {"lives", "cpu", "for_ever"};
  Program host = start_rank(0, port, lives), other = start_rank(1, port, lives);
  ASSERT_TRUE(host.wait_for("connected"));
  ASSERT_TRUE(other.wait_for("connected"));
  const auto second_host = run_alone({"collectives"}, as_rank(0, 2, port, "60"));
  EXPECT_EQ(second_host.code, 3);
  EXPECT_THAT(second_host.err, FailsIn(0, Error::machine));
  const auto second = run_alone({"collectives"}, as_rank(1, 2, port, "60"));
  EXPECT_EQ(second.code, 3);
  EXPECT_THAT(second.err, FailsIn(1, Error::refused));
  std::this_thread::sleep_for(500ms);  // a failure would be in the store by now, and known
  for (auto* const process : {&host, &other}) EXPECT_THAT(state_of(process->pid()), testing::AnyOf('S', 'R'));
  for (auto* const process : {&other, &host}) process->send(SIGKILL);  // who keeps the store last
  for (auto* const process : {&host, &other}) EXPECT_EQ(process->finish().err, "");
}

// Whoever's rank 0 gets the port. Nobody of the other job takes a place in that one's.
TEST(StartFailures, OfTwoJobsOfOtherSizesThatComeToOnePortAtOnceOneRuns) {
  std::vector<std::pair<int, int>> processes = {{0, 2}, {1, 2}, {0, 3}, {1, 3}, {2, 3}};  // rank, of how many
  for (int round = 0; round < 5; ++round) {
    const std::string port = free_port();
    std::map<std::pair<int, int>, std::unique_ptr<Program>> programs;
    for (const auto& [rank, size] : processes) {
      auto surroundings = surroundings_with(as_rank(rank, size, port, "60"));
      surroundings.program = ranks_program();
      programs[{rank, size}] = std::make_unique<Program>(Words{"lives", "cpu", "for_ever"}, surroundings);
    }
    const int runs = programs[{0, 2}]->wait_for("connected") ? 2 : 3, other = 5 - runs;
    for (int rank = 0; rank < other; ++rank) {
      const std::string err = programs[{rank, other}]->finish().err;
      EXPECT_THAT(err, FailsIn(rank, rank == 0 ? Error::machine : Error::refused));
    }
    for (int rank = 0; rank < runs; ++rank) EXPECT_TRUE((programs[{rank, runs}]->wait_for("connected")));
    for (int rank = 0; rank < runs; ++rank) programs[{rank, runs}]->send(SIGKILL);
    std::rotate(processes.begin(), processes.begin() + 1, processes.end());
  }
}

// Not even of one that the system chooses a port for.
TEST(StartFailures, ATestsPortIsNobodyElses) {
  const std::string port = free_port();
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(std::stoi(port)));
  EXPECT_NE(bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  EXPECT_EQ(errno, EADDRINUSE);
  close(fd);
  EXPECT_NE(free_port(), port);
}

TEST(StartFailures, APeerThatNeverComesIsNamedAtTheDeadline) {
  const auto start = std::chrono::steady_clock::now();
  const auto host = run_alone({"collectives"}, as_rank(0, 2, free_port(), "1.5"));
  EXPECT_EQ(host.code, 3);
  EXPECT_THAT(host.err, FailsIn(0, Error::late));

  const std::string port = free_port();
  const auto client = run_alone({"collectives"}, as_rank(1, 2, port, "1.5"));
  EXPECT_EQ(client.code, 3);
  EXPECT_THAT(client.err, FailsIn(1, Error::late));
  EXPECT_LT(std::chrono::steady_clock::now() - start, kBeforeTimeouts);
}

TEST(StartFailures, WithoutALauncherRank0KeepsTheStore) {
  const std::string port = free_port();
  auto surroundings = surroundings_with(as_rank(1, 2, port, "60"));
  surroundings.program = ranks_program();
  Program other({"throws"}, surroundings);
  const auto host = run_alone({"throws"}, as_rank(0, 2, port, "60"));
  EXPECT_THAT(host.err, FailsIn(0, Error::user_code, {1}));
  EXPECT_THAT(other.finish().err, FailsIn(1, Error::user_code, {1}));
}

TEST(StartFailures, AnIncompleteEnvironmentIsRefusedByName) {
  const auto job = run_alone({"collectives"}, {"RANK=0", "WORLD_SIZE=2"});
  EXPECT_EQ(job.code, 3);
  EXPECT_THAT(job.err, HasSubstr("LOCAL_RANK, LOCAL_WORLD_SIZE not set"));
}

}  // namespace start_failures_test
