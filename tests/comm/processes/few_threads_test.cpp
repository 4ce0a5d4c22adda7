// Labels: processes program thorough
// Processes that may start some threads, and no more.
#include "data/parts.hpp"

#include "running_job.hpp"

namespace few_threads_test {

using namespace lockstep;
using testing::AllOf;
using testing::ContainsRegex;
using testing::HasSubstr;
using testing::Not;

// Whichever thread of this rank's process cannot be started, all processes say so, soon, and nobody else is blamed.
// With enough threads the job ends with `code`.
void expect_named(int processes, const Words& words, int rank, Range numbers, int code = 0) {
  std::atomic<int> failed = 0;
  side_by_side(static_cast<int>(numbers.size()), [&](int i) {
    const int64_t threads = numbers.begin + i;
    const auto start = std::chrono::steady_clock::now();
    const auto job = run_launched(processes, words,
                                  {"LD_PRELOAD=" + from_environment("LOCKSTEP_FAULTY_THREADS"),
                                   "FAULT_RANK=" + std::to_string(rank), "FAULT_THREADS=" + std::to_string(threads)});
    if (job.code == code) return;
    ++failed;
    const std::string where = "after " + std::to_string(threads) + " threads";
    EXPECT_EQ(job.code, 3) << where << ": " << job.err;
    const std::string named = "the system starts no more threads: ulimit -u",
                      absent = "did not come to run\\(\\): it ended with";
    for (int process = 0; process < processes; ++process) {
      EXPECT_THAT(job.err, ContainsRegex("process " + std::to_string(process) + ": [^\n]*(" + named +
                                         (process == rank ? ")" : "|" + absent + ")")))
          << where;
    }
    for (const char* wrong : {"terminate called", "not an Error", "stranger", "without a word"}) {
      EXPECT_THAT(job.err, Not(HasSubstr(wrong))) << where;
    }
    EXPECT_LT(std::chrono::steady_clock::now() - start, 3 * kBeforeTimeouts) << where;
  });
  EXPECT_GT(failed, 0);
}

TEST(FewThreads, AreNamedByAllProcesses) {
  expect_named(2, {"collectives"}, 1, {0, 8});
}

TEST(FewThreads, AreNamedWhereSeveralRanksAreInAProcess) {
  expect_named(2, {"collectives", "4xcpu"}, 0, {2, 12});
}

TEST(FewThreads, AreNamedByAParameterServer) {
  expect_named(3, {"serves", "cpu", "0"}, 2, {6, 15}, /*code=*/128 + SIGKILL);  // rank 2 is the server
}

// Its environment is a rank's, to which the library's limit applies.
TEST(FewThreads, AreNamedByALauncherThatCanStartNone) {
  const auto job = run_program({"launch", "-n", "1", "true"},
                               surroundings_with({"LD_PRELOAD=" + from_environment("LOCKSTEP_FAULTY_THREADS"), "RANK=0",
                                                  "FAULT_RANK=0", "FAULT_THREADS=0"}));
  EXPECT_EQ(job.code, 1);
  EXPECT_THAT(job.err, HasSubstr("lockstep: error: the system starts no more threads: ulimit -u"));
}

}  // namespace few_threads_test
