// Labels: processes
// Not under sanitizers: *InOperationOrSizeAlone*
// Ranks of several processes that make calls which do not fit together: all are told so, with both calls.
#include "timed_job.hpp"

#include <string>
#include <utility>
#include <vector>

namespace differing_calls_test {

using namespace lockstep;
using testing::AllOf;
using testing::HasSubstr;

TEST(DifferingCalls, RanksOfAProcessThatGiveTheSameMemoryAreRefused) {
  const auto [job, took] = timed(2, {"shares_memory", "4xcpu"});
  EXPECT_EQ(job.code, 3);
  EXPECT_THAT(job.err, AllOf(HasSubstr("gave the same memory to allreduce(sum) of float [100]"),
                             HasSubstr("each rank needs a tensor of its own")));
}

TEST(DifferingCalls, CallsThatDifferAreShownBoth) {
  at_once<const char*>({"cpu", "4xcpu"}, [](const char* const devices) {
    const auto [job, took] = timed(2, {"calls_otherwise", devices});
    EXPECT_EQ(job.code, 3);
    for (const char* process : {"process 0", "process 1"}) {
      EXPECT_THAT(job.err, HasSubstr(std::string(process) + ": "));
    }
    EXPECT_THAT(job.err,
                AllOf(HasSubstr("calls differ"), HasSubstr("rank 1 (cpu) called broadcast(root 0) of float [5]"),
                      HasSubstr(" called allreduce(sum) of float [2, 3]")));
    EXPECT_LT(took, kBeforeTimeouts);
  });
}

TEST(DifferingCalls, CallsThatDifferInOperationOrSizeAloneNeverMeet) {
  const std::vector<std::pair<std::string, std::string>> calls = {{"max", "allreduce(max) of float [2, 3]"},
                                                                  {"long", "allreduce(sum) of float [1000000]"},
                                                                  {"empty", "allreduce(sum) of float [0]"}};
  at_once<std::pair<int, const char*>>({{2, "cpu"}, {3, "cpu"}, {2, "4xcpu"}}, [&](const auto& job_of) {
    const auto& [processes, devices] = job_of;
    std::vector<Words> jobs;
    for (const auto& call : calls) jobs.push_back({"calls_otherwise", devices, call.first});
    const auto results = timed_side_by_side(processes, jobs);
    for (size_t i = 0; i < calls.size(); ++i) {
      const auto& [job, took] = results[i];
      EXPECT_EQ(job.code, 3) << job.err;
      for (int process = 0; process < processes; ++process) {
        EXPECT_THAT(job.err, HasSubstr("process " + std::to_string(process) + ": "));
      }
      EXPECT_THAT(job.err, AllOf(HasSubstr("calls differ"), HasSubstr("rank 1 (cpu) called " + calls[i].second),
                                 HasSubstr(" called allreduce(sum) of float [2, 3]")));
      EXPECT_LT(took, kBeforeTimeouts);
    }
  });
}

TEST(DifferingCalls, CallsThatDifferInAGroupEndTheWholeRun) {
  at_once<std::pair<int, const char*>>({{3, "cpu"}, {2, "4xcpu"}}, [&](const auto& job_of) {
    const auto& [processes, devices] = job_of;
    const auto [job, took] = timed(processes, {"calls_otherwise_in_a_group", devices});
    EXPECT_EQ(job.code, 3) << job.err;
    for (int process = 0; process < processes; ++process) {
      EXPECT_THAT(job.err, HasSubstr("process " + std::to_string(process) + ": "));
    }
    EXPECT_THAT(job.err,
                AllOf(HasSubstr("calls differ"), HasSubstr("rank 1 (cpu) called broadcast(root 0) of float [5]"),
                      HasSubstr("rank 0 (cpu) called allreduce(sum) of float [2, 3]")));
    EXPECT_LT(took, kBeforeTimeouts);
  });
}

TEST(DifferingCalls, PartsOfAnAlltoallThatDoNotFitAreShown) {
  at_once<int>({2, 3}, [](const int processes) {
    const auto [job, took] = timed(processes, {"parts_do_not_fit"});
    EXPECT_EQ(job.code, 3) << job.err;
    for (int process = 0; process < processes; ++process) {
      EXPECT_THAT(job.err, HasSubstr("process " + std::to_string(process) + ": "));
    }
    EXPECT_THAT(job.err, HasSubstr("alltoall: rank 0 sends float [6] to rank 1, which expects float [9]"));
    EXPECT_LT(took, kBeforeTimeouts);
  });
}

TEST(DifferingCalls, GrainsOfWhichTheRanksDoNotAgreeAreShown) {
  at_once<int>({2, 3}, [](const int processes) {
    const auto [job, took] = timed(processes, {"grains_of_others"});
    EXPECT_EQ(job.code, 3) << job.err;
    EXPECT_THAT(job.err, AllOf(HasSubstr("calls differ"), HasSubstr("called alltoall of grains at [0, 2, "),
                               HasSubstr("rank 1 (cpu) called alltoall of grains at [0, 3, ")));
    EXPECT_LT(took, kBeforeTimeouts);
  });
}

TEST(DifferingCalls, MessagesThatDoNotFitAreShownBoth) {
  const auto [job, took] = timed(2, {"message_fails", "cpu", "size"});
  EXPECT_EQ(job.code, 3) << job.err;
  for (const char* process : {"process 0", "process 1"}) {
    EXPECT_THAT(job.err, HasSubstr(std::string(process) + ": "));
  }
  EXPECT_THAT(job.err, AllOf(HasSubstr("the two sides of message 1 from rank 0 to rank 1, tag 7 differ"),
                             HasSubstr("rank 0 (cpu) called send to rank 1 of float [1000000]"),
                             HasSubstr("rank 1 (cpu) called recv from rank 0 of float [3]")));
  EXPECT_LT(took, kBeforeTimeouts);
}

// Gloo writes to a closed connection, which by default ends a process.
TEST(DifferingCalls, MessagesToAKilledProcessAreAnErrorAndNoSignal) {
  const auto [job, took] = timed(2, {"message_fails", "cpu", "dead"});
  EXPECT_THAT(job.err, AllOf(HasSubstr("process 0: "), HasSubstr("the process of rank 1 (cpu) is gone")));
  EXPECT_LT(took, kBeforeTimeouts);
}

TEST(DifferingCalls, AMessageThatCannotComeEndsTheWaitForIt) {
  const auto [job, took] = timed(2, {"message_fails", "cpu", "none"});
  EXPECT_EQ(job.code, 3) << job.err;
  for (const char* process : {"process 0", "process 1"}) {
    EXPECT_THAT(job.err, HasSubstr(std::string(process) + ": rank 0 (cpu) returned without the send that rank 1 (cpu) "
                                                          "waits for: recv from rank 0 of float [3]"));
  }
  EXPECT_LT(took, kBeforeTimeouts);

  const auto [tag, took_too] = timed(2, {"message_fails", "cpu", "tag"});
  EXPECT_THAT(tag.err, HasSubstr("a message's tag is 1048576; between processes tags go from 0 to 32767"));
}

TEST(DifferingCalls, RanksThatWaitForEachOtherAreToldSo) {
  at_once<const char*>({"recv", "mixed"}, [](const char* const how) {
    const auto [job, took] = timed(2, {"waits_crosswise", "cpu", how});
    EXPECT_EQ(job.code, 3) << job.err;
    for (const char* process : {"process 0", "process 1"}) {
      EXPECT_THAT(job.err, HasSubstr(std::string(process) + ": the ranks wait for each other: "));
    }
    EXPECT_LT(took, kBeforeTimeouts);
  });
}

// DataParallel polls its calls while backward computes, and then waits for them; here for a group's, while the other
// rank waits for one of all.
TEST(DifferingCalls, ARankWithABatchFewerIsToldSo) {
  const auto [job, took] = timed(2, {"has_a_batch_fewer"});
  EXPECT_EQ(job.code, 3) << job.err;
  for (const char* process : {"process 0", "process 1"}) {
    EXPECT_THAT(job.err, HasSubstr(std::string(process) + ": the ranks wait for each other: "));
  }
  EXPECT_LT(took, kBeforeTimeouts);
}

}  // namespace differing_calls_test
