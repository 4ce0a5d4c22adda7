// Labels: processes
// Not under sanitizers: *InOperationOrSizeAlone*
// Ranks of several processes that make calls which do not fit together: all are told so, with both calls.
#include "timed_job.hpp"

#include <string>
#include <utility>
#include <vector>

namespace differing_calls_test {

using namespace lockstep;

TEST(DifferingCalls, RanksOfAProcessThatGiveTheSameMemoryAreRefused) {
  const auto [job, took] = timed(2, {"shares_memory", "4xcpu"});
  EXPECT_EQ(job.code, 3);
  EXPECT_THAT(job.err, AllFail(2, Error::difference));
}

TEST(DifferingCalls, CallsThatDifferAreShownBoth) {
  at_once<const char*>({"cpu", "4xcpu"}, [](const char* const devices) {
    const auto [job, took] = timed(2, {"calls_otherwise", devices});
    EXPECT_EQ(job.code, 3);
    EXPECT_THAT(job.err, AllFail(2, Error::difference));
    EXPECT_LT(took, kBeforeTimeouts);
  });
}

TEST(DifferingCalls, CallsThatDifferInOperationOrSizeAloneNeverMeet) {
  at_once<std::pair<int, const char*>>({{2, "cpu"}, {3, "cpu"}, {2, "4xcpu"}}, [&](const auto& job_of) {
    const auto& [processes, devices] = job_of;
    std::vector<Words> jobs;
    for (const char* call : {"max", "long", "empty"}) jobs.push_back({"calls_otherwise", devices, call});
    for (const auto& [job, took] : timed_side_by_side(processes, jobs)) {
      EXPECT_EQ(job.code, 3) << job.err;
      EXPECT_THAT(job.err, AllFail(processes, Error::difference));
      EXPECT_LT(took, kBeforeTimeouts);
    }
  });
}

TEST(DifferingCalls, CallsThatDifferInAGroupEndTheWholeRun) {
  at_once<std::pair<int, const char*>>({{3, "cpu"}, {2, "4xcpu"}}, [&](const auto& job_of) {
    const auto& [processes, devices] = job_of;
    const auto [job, took] = timed(processes, {"calls_otherwise_in_a_group", devices});
    EXPECT_EQ(job.code, 3) << job.err;
    EXPECT_THAT(job.err, AllFail(processes, Error::difference));
    EXPECT_LT(took, kBeforeTimeouts);
  });
}

TEST(DifferingCalls, PartsOfAnAlltoallThatDoNotFitAreShown) {
  at_once<int>({2, 3}, [](const int processes) {
    const auto [job, took] = timed(processes, {"parts_do_not_fit"});
    EXPECT_EQ(job.code, 3) << job.err;
    EXPECT_THAT(job.err, AllFail(processes, Error::difference));
    EXPECT_LT(took, kBeforeTimeouts);
  });
}

TEST(DifferingCalls, GrainsOfWhichTheRanksDoNotAgreeAreShown) {
  at_once<int>({2, 3}, [](const int processes) {
    const auto [job, took] = timed(processes, {"grains_of_others"});
    EXPECT_EQ(job.code, 3) << job.err;
    EXPECT_THAT(job.err, AllFail(processes, Error::difference));
    EXPECT_LT(took, kBeforeTimeouts);
  });
}

TEST(DifferingCalls, MessagesThatDoNotFitAreShownBoth) {
  const auto [job, took] = timed(2, {"message_fails", "cpu", "size"});
  EXPECT_EQ(job.code, 3) << job.err;
  EXPECT_THAT(job.err, AllFail(2, Error::difference, {0, 1}));
  EXPECT_LT(took, kBeforeTimeouts);
}

// Gloo writes to a closed connection, which by default ends a process.
TEST(DifferingCalls, MessagesToAKilledProcessAreAnErrorAndNoSignal) {
  const auto [job, took] = timed(2, {"message_fails", "cpu", "dead"});
  EXPECT_THAT(job.err, FailsIn(0, Error::death, {1}));
  EXPECT_LT(took, kBeforeTimeouts);
}

TEST(DifferingCalls, AMessageThatCannotComeEndsTheWaitForIt) {
  const auto [job, took] = timed(2, {"message_fails", "cpu", "none"});
  EXPECT_EQ(job.code, 3) << job.err;
  EXPECT_THAT(job.err, AllFail(2, Error::difference, {0}));
  EXPECT_LT(took, kBeforeTimeouts);

  const auto [tag, took_too] = timed(2, {"message_fails", "cpu", "tag"});
  EXPECT_THAT(tag.err, AllFail(2, Error::refused));
}

TEST(DifferingCalls, RanksThatWaitForEachOtherAreToldSo) {
  at_once<const char*>({"recv", "mixed"}, [](const char* const how) {
    const auto [job, took] = timed(2, {"waits_crosswise", "cpu", how});
    EXPECT_EQ(job.code, 3) << job.err;
    EXPECT_THAT(job.err, AllFail(2, Error::difference));
    EXPECT_LT(took, kBeforeTimeouts);
  });
}

// DataParallel polls calls while backward computes, and then waits for them; here for a group's, while the other rank
// waits for one of all.
TEST(DifferingCalls, ARankWithABatchFewerIsToldSo) {
  const auto [job, took] = timed(2, {"has_a_batch_fewer"});
  EXPECT_EQ(job.code, 3) << job.err;
  EXPECT_THAT(job.err, AllFail(2, Error::difference));
  EXPECT_LT(took, kBeforeTimeouts);
}

}  // namespace differing_calls_test
