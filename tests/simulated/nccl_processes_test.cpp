// Labels: simulated processes thorough
// Ranks over NCCL in several processes, with a stand-in for NCCL on simulated GPUs: what they compute, and that all
// others end soon if one fails, wherever that is.
#include "comm/processes/running_job.hpp"

namespace nccl_processes_test {

using namespace lockstep;
using testing::HasSubstr;
using testing::IsEmpty;

Words ranks(const std::string& scenario, int processes, const std::string& argument) {
  std::string devices;
  for (int index = 0; index < processes; ++index) devices += (index == 0 ? "cuda:" : ",cuda:") + std::to_string(index);
  return {from_environment("LOCKSTEP_NCCL_PROGRAM"), scenario, devices, argument};
}

Finished launched(int processes, const Words& words) {
  return run_program(Words{"launch", "-n", std::to_string(processes)} + words, surroundings_with());
}

TEST(NcclProcesses, MakeEveryCall) {
  expect_all_ok(launched(3, ranks("collectives", 3, "")), 3);
}

TEST(NcclProcesses, ReplayTheirExchange) {
  expect_all_ok(launched(2, ranks("replays", 2, "")), 2);
  expect_all_ok(launched(2, ranks("recorded", 2, "")), 2);
}

TEST(NcclProcesses, TrainLikeThreads) {
  const ScratchFolder folder;
  const auto as_processes = folder / "processes", as_threads = folder / "threads";
  expect_all_ok(launched(2, ranks("training", 2, as_processes)), 2);
  const Words words = ranks("training", 2, as_threads);
  auto surroundings = surroundings_with();
  surroundings.program = words[0];
  expect_all_ok(run_program(Words(words.begin() + 1, words.end()), surroundings), 1);
  EXPECT_EQ(difference(as_processes, as_threads), 0);
}

struct Fault {
  std::string where, how, said;  // by all processes that are left
};

const std::string kIsGone = "the process of rank 1 (cuda:1) is gone: it was ended by signal 9 (Killed)";
const std::string kThrew = "rank 1 (cuda:1): out of luck";

void expect_that_all_end_soon(const Fault& fault) {
  const auto& [where, how, said] = fault;
  const bool killed = how == "killed";
  const int processes = killed ? 3 : 2;
  const ScratchFolder folder;
  const auto start = RunningJob::Clock::now();
  RunningJob job(processes, /*launched=*/true, ranks("fails", processes, where + "-" + how), folder.path());
  const auto finished = job.finish()[0];
  const std::string all = where + "-" + how + ":\n" + finished.err + finished.out;
  EXPECT_LT(RunningJob::Clock::now() - start, kBeforeTimeouts) << all;
  EXPECT_EQ(finished.code, killed ? 128 + SIGKILL : 3) << all;
  for (int process = 0; process < processes; ++process) {
    if (process == 1 && killed) continue;
    const std::string name = "process " + std::to_string(process) + ": ";
    ASSERT_THAT(finished.err, HasSubstr(name)) << all;
    const size_t at = finished.err.find(name);
    const std::string text = finished.err.substr(at, finished.err.find('\n', at) - at);
    EXPECT_THAT(text, HasSubstr(said)) << all;
    if (killed) EXPECT_THAT(text, testing::ContainsRegex(R"(\. Last calls: ranks 0, .*: .*)")) << all;
  }
  EXPECT_THAT(finished.out, testing::Not(HasSubstr("goes on"))) << all;
  EXPECT_THAT(job.leftovers(), IsEmpty()) << all;
}

TEST(NcclProcesses, EndSoonIfOneIsKilledAnywhere) {
  at_once<Fault>({{"init", "killed", kIsGone},
                  {"first", "killed", kIsGone},
                  {"group", "killed", kIsGone},
                  {"call", "killed", kIsGone},
                  {"kernel", "killed", kIsGone},
                  {"replay", "killed", kIsGone},
                  {"shutdown", "killed", kIsGone}},
                 expect_that_all_end_soon);
}

TEST(NcclProcesses, EndSoonIfARankThrowsAnywhere) {
  at_once<Fault>({{"init", "throws", "rank 1 (cuda:1): connecting to the other ranks failed: out of luck"},
                  {"first", "throws", kThrew},
                  {"group", "throws", kThrew},
                  {"call", "throws", kThrew},
                  {"values", "throws", kThrew},
                  {"replay", "throws", kThrew},
                  {"shutdown", "throws", "rank 1 (cuda:1): taking down its communicators failed: out of luck"}},
                 expect_that_all_end_soon);
}

TEST(NcclProcesses, EndSoonIfARankReturnsWithoutTheOthersCall) {
  expect_that_all_end_soon({"return", "early",
                            "rank 1 (cuda:1) returned without the call that rank 0 (cuda:0) waits for: allreduce(sum) "
                            "of float [3] (collective call 0)"});
}

// NCCL's stand-in lets calls of different sizes come about.
TEST(NcclProcesses, EndSoonIfTheirCallsDiffer) {
  expect_that_all_end_soon(
      {"size", "differs",
       "made 2 collective calls each, but not the same ones; those that differ never came about. The "
       "last was allreduce(sum) of float [3000000] on rank 1 (cuda:1) and allreduce(sum) of float [3] "
       "on rank 0 (cuda:0)"});
}

}  // namespace nccl_processes_test
