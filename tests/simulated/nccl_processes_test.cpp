// Labels: simulated processes
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

class NcclProcessFailures : public testing::TestWithParam<Fault> {};
INSTANTIATE_TEST_SUITE_P(Faults, NcclProcessFailures,
                         testing::Values(Fault{"init", "killed", "the process of rank 1 (cuda:1) is gone"},
                                         Fault{"init", "throws", "out of luck"},
                                         Fault{"first", "killed", "the process of rank 1 (cuda:1) is gone"},
                                         Fault{"first", "throws", "rank 1 (cuda:1): out of luck"},
                                         Fault{"group", "killed", "the process of rank 1 (cuda:1) is gone"},
                                         Fault{"group", "throws", "rank 1 (cuda:1): out of luck"},
                                         Fault{"call", "killed", "the process of rank 1 (cuda:1) is gone"},
                                         Fault{"call", "throws", "rank 1 (cuda:1): out of luck"},
                                         Fault{"kernel", "killed", "the process of rank 1 (cuda:1) is gone"},
                                         Fault{"values", "throws", "rank 1 (cuda:1): out of luck"},
                                         Fault{"shutdown", "killed", "the process of rank 1 (cuda:1) is gone"},
                                         Fault{"shutdown", "throws", "out of luck"},
                                         Fault{"return", "early",
                                               "rank 1 (cuda:1) returned without the call that rank "}),
                         [](const auto& fault) { return fault.param.where + "_" + fault.param.how; });

TEST_P(NcclProcessFailures, EndAllOthersSoon) {
  const auto& [where, how, said] = GetParam();
  const ScratchFolder folder;
  RunningJob job(3, /*launched=*/true, ranks("fails", 3, where + "-" + how), folder.path());
  const auto start = RunningJob::Clock::now();
  const auto finished = job.finish()[0];
  EXPECT_EQ(finished.code, how == "killed" ? 128 + SIGKILL : 3) << finished.err << finished.out;
  EXPECT_LT(RunningJob::Clock::now() - start, kBeforeTimeouts) << finished.err;
  for (int process = 0; process < 3; ++process) {
    if (process == 1 && how == "killed") continue;
    const std::string name = "process " + std::to_string(process) + ": ";
    ASSERT_THAT(finished.err, HasSubstr(name));
    const size_t at = finished.err.find(name);
    EXPECT_THAT(finished.err.substr(at, finished.err.find('\n', at) - at), HasSubstr(said)) << finished.err;
  }
  EXPECT_THAT(finished.out, testing::Not(HasSubstr("goes on")));
  EXPECT_THAT(job.leftovers(), IsEmpty());
}

}  // namespace nccl_processes_test
