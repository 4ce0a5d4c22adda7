// Labels: processes
// A worker process of an asynchronous parameter server that is killed, or that stands still: the others go on if they
// were told to, and every other failure stays one.
#include "running_job.hpp"

#include <chrono>
#include <cstdlib>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

namespace lost_workers_test {

using namespace lockstep;
using namespace std::chrono_literals;
using testing::AllOf;
using testing::ContainsRegex;
using testing::HasSubstr;
using testing::Not;

constexpr const char* kKilled = "the process of rank 1 (cpu) is gone: it was ended by signal 9 (Killed)";

struct Timed {
  Finished job;
  std::chrono::steady_clock::duration took;
};

Words keep_going(int processes, const std::string& devices, const std::string& argument,
                 const std::string& scenario = "loses_a_worker") {
  return {"launch", "--keep-going", "-n", std::to_string(processes), ranks_program(), scenario, devices, argument};
}

Timed timed(const Words& words) {
  const auto start = std::chrono::steady_clock::now();
  auto job = run_program(words, surroundings_with());
  return {std::move(job), std::chrono::steady_clock::now() - start};
}

void expect_all_but_1_ok(const Finished& job, int processes) {
  for (int process = 0; process < processes; ++process) {
    const std::string text = "process " + std::to_string(process) + ": ok\n";
    if (process != 1) EXPECT_THAT(job.out, HasSubstr(text)) << job.err;
  }
}

TEST(LostWorkers, TheOthersTrainOnWithoutAKilledOne) {
  const std::vector<std::tuple<int, std::string, std::string>> jobs = {{3, "cpu", "then_trains"},
                                                                       {4, "cpu", "bounded two_servers then_trains"},
                                                                       {3, "cpu", "busy"},
                                                                       {3, "6xcpu", "two_servers"},
                                                                       {3, "cpu", "at_the_end then_trains"}};
  side_by_side(static_cast<int>(jobs.size()), [&](int i) {
    const auto& [processes, devices, argument] = jobs[i];
    const auto [job, took] = timed(keep_going(processes, devices, argument));
    EXPECT_EQ(job.code, 128 + SIGKILL) << job.err;
    expect_all_but_1_ok(job, processes);
    EXPECT_THAT(job.err, AllOf(ContainsRegex("lockstep launch: rank 1 was ended by signal 9 \\(Killed\\) after [0-9.]+ "
                                             "s; the others go on without it\n"),
                               Not(HasSubstr("ending the others")), Not(HasSubstr("process "))))
        << devices << ": " << argument;
    EXPECT_LT(took, kBeforeTimeouts);
  });
}

TEST(LostWorkers, TheExampleShowsIt) {
  const char* const folder = std::getenv("LOCKSTEP_EXAMPLE_PROGRAMS");
  if (folder == nullptr) GTEST_SKIP() << "this build has no examples";
  const auto [job, took] =
      timed({"launch", "--keep-going", "-n", "3", std::string(folder) + "/example_03_parameter_server"});
  EXPECT_EQ(job.code, 128 + SIGKILL) << job.err;
  EXPECT_THAT(job.out, ContainsRegex("one is killed +loss [0-9.]+, without worker 1: the process of rank 1 "));
  EXPECT_THAT(job.out, HasSubstr(kKilled));
  EXPECT_LT(took, kBeforeTimeouts);
}

TEST(LostWorkers, ACallOfAllRanksAfterALossIsAnErrorThatSaysWhy) {
  const auto [job, took] = timed(keep_going(3, "cpu", "then_meets"));
  EXPECT_EQ(job.code, 128 + SIGKILL);
  for (const char* survivor : {"process 0: ", "process 2: "}) {
    EXPECT_THAT(job.err, HasSubstr(survivor));
  }
  EXPECT_THAT(job.err, AllOf(HasSubstr(std::string(": ") + kKilled + ". The run has gone on without it"),
                             HasSubstr(" (cpu): barrier (collective call ")));
  EXPECT_LT(took, kBeforeTimeouts);
}

TEST(LostWorkers, TheNextRunSaysWhoIsMissing) {
  const auto [job, took] = timed(keep_going(3, "cpu", "then_runs"));
  for (const char* survivor : {"process 0: ", "process 2: "}) {
    EXPECT_THAT(job.err, HasSubstr(std::string(survivor) + "process 1 of 3 did not come to run(): it was ended by "
                                                           "signal 9 (Killed)\n"));
  }
  EXPECT_LT(took, kBeforeTimeouts);
}

TEST(LostWorkers, AnyOtherKilledProcessEndsTheRunAsEver) {
  const auto expect_named = [](const Words& words, int victim) {
    const auto [job, took] = timed(words);
    EXPECT_EQ(job.code, 128 + SIGKILL) << job.err;
    for (const int survivor : {0, 1, 2}) {
      if (survivor == victim) continue;
      EXPECT_THAT(job.err, HasSubstr("process " + std::to_string(survivor) + ": the process of rank " +
                                     std::to_string(victim) + " (cpu) is gone"));
    }
    EXPECT_THAT(job.err, Not(HasSubstr("go on without it")));
    EXPECT_LT(took, kBeforeTimeouts);
  };
  const std::vector<std::pair<Words, int>> jobs = {{keep_going(3, "cpu", "2", "serves"), 2},  // a server
                                                   {keep_going(3, "cpu", "synchronous"), 1},
                                                   {keep_going(3, "cpu", "", "dies"), 1},           // no training
                                                   {launch(3, {"loses_a_worker", "cpu", ""}), 1}};  // nobody said so
  side_by_side(static_cast<int>(jobs.size()), [&](int i) { expect_named(jobs[i].first, jobs[i].second); });
}

// Two jobs at the same time, since both wait until the silence counts as an end.
TEST(LostWorkers, OneThatStoodStillLearnsThatItIsOutAndOneThatStillDoesIsEnded) {
  const auto start = std::chrono::steady_clock::now();
  Program back(keep_going(3, "cpu", "freezes then_comes_back"), surroundings_with());
  Program still(keep_going(3, "cpu", "freezes"), surroundings_with());
  const auto came_back = back.finish(), stood_still = still.finish();

  expect_all_but_1_ok(came_back, 3);
  EXPECT_EQ(came_back.code, 3);
  EXPECT_THAT(came_back.err,
              AllOf(HasSubstr("process 1: the others have gone on without this process, which they took for gone: the "
                              "process of rank 1 (cpu) is gone: it ended without a word (killed, or it crashed), or it "
                              "stands still\n"),
                    ContainsRegex("rank 1 ended with exit code 3 after [0-9.]+ s; the others go on without it\n")));

  expect_all_but_1_ok(stood_still, 3);
  EXPECT_EQ(stood_still.code, 128 + SIGKILL);
  EXPECT_THAT(stood_still.err, HasSubstr("lockstep launch: rank 1 did not end, so it was killed"));
  EXPECT_LT(std::chrono::steady_clock::now() - start, kSlowdown * 60s);
}

// As with srun, which can leave the others alone too.
TEST(LostWorkers, WithoutALauncherThatSeesItSilenceCounts) {
  const auto start = std::chrono::steady_clock::now();
  const auto process = [&](int rank) {
    auto surroundings =
        surroundings_with({"OMPI_COMM_WORLD_RANK=" + std::to_string(rank), "OMPI_COMM_WORLD_SIZE=3",
                           "OMPI_COMM_WORLD_LOCAL_RANK=" + std::to_string(rank), "OMPI_COMM_WORLD_LOCAL_SIZE=3",
                           "PMIX_NAMESPACE=lost-workers-" + std::to_string(getpid()), "LOCKSTEP_KEEP_GOING=1"});
    surroundings.program = ranks_program();
    return std::make_unique<Program>(Words{"loses_a_worker", "cpu", ""}, surroundings);
  };
  const auto first = process(0), last = process(2);
  EXPECT_EQ(process(1)->finish().signal, SIGKILL);
  for (const auto& survivor : {first->finish(), last->finish()}) {
    EXPECT_EQ(survivor.code, 0) << survivor.err;
    EXPECT_THAT(survivor.out, HasSubstr(": ok\n"));
  }
  EXPECT_LT(std::chrono::steady_clock::now() - start, kSlowdown * 30s);
}

}  // namespace lost_workers_test
