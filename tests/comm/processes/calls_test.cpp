// The counts of the ranks' calls, and what they say at the end of a run.
#include "comm/processes/calls.hpp"

#include <gmock/gmock.h>
#include <torch/torch.h>

namespace calls_test {

using namespace lockstep;
using comm::Calls;
using testing::AllOf;
using testing::HasSubstr;

const comm::Roster roster{{Devices(1, torch::kCPU), Devices(2, torch::kCPU)}};  // three ranks in two processes

std::vector<Calls> three(int64_t collective) {
  std::vector<Calls> all(3, Calls(3));
  for (auto& calls : all) {
    for (int64_t i = 0; i < collective; ++i) calls.collective[""].add("barrier");
  }
  return all;
}

TEST(CallsTest, SurviveTheStore) {
  Calls calls(3);
  for (int i = 0; i < 7; ++i) calls.collective["/0.1"].add("allreduce(sum) of float [2]");
  calls.last = "send 2 to rank 2";
  calls.sent = {0, 1, 2};
  calls.received = {3, 0, 5};
  const Calls read = Calls::from_text(calls.to_text(), 3);
  const auto& group = read.of("/0.1");
  EXPECT_EQ(group.count, 7);
  EXPECT_EQ(group.last(), "allreduce(sum) of float [2]");
  EXPECT_EQ(group.text_of(group.count - 1), group.last());
  EXPECT_EQ(group.text_of(group.count), "");
  EXPECT_EQ(group.fingerprint, calls.of("/0.1").fingerprint);
  EXPECT_EQ(read.of("").count, 0);
  EXPECT_EQ(read.last, calls.last);
  EXPECT_EQ(read.sent, calls.sent);
  EXPECT_EQ(read.received, calls.received);
}

TEST(CallsTest, ThatFitTogetherAreNoError) {
  auto all = three(4);
  all[0].sent[2] = all[2].received[0] = 3;
  EXPECT_EQ(comm::unanswered(all, roster), "");
}

TEST(CallsTest, ACollectiveThatSomeDidNotMakeIsNamedWithAllThatLack) {
  auto all = three(4);
  all[1].collective[""].add("allreduce(sum) of float [2]");
  EXPECT_EQ(
      comm::unanswered(all, roster),
      "rank 1 (cpu) called allreduce(sum) of float [2] (collective call 4) and did not wait for it; it never came "
      "about, for want of rank 0 (cpu) and rank 2 (cpu). All ranks must make the same calls");
}

TEST(CallsTest, AsManyButOtherCollectivesAreNamed) {
  auto all = three(4);
  for (size_t rank = 0; rank < 3; ++rank) {
    all[rank].collective[""].add(rank == 2 ? "allreduce(max) of float [2]" : "allreduce(sum) of float [2]");
    all[rank].collective[""].add("barrier");
  }
  EXPECT_THAT(comm::unanswered(all, roster), AllOf(HasSubstr("rank 2 (cpu) and rank 0 (cpu) made 6 collective calls"),
                                                   HasSubstr("not the same ones")));
  auto swapped = three(0);
  for (size_t rank = 0; rank < 3; ++rank) {
    swapped[rank].collective[""].add(rank == 1 ? "a" : "b");
    swapped[rank].collective[""].add(rank == 1 ? "b" : "a");
  }
  EXPECT_THAT(comm::unanswered(swapped, roster), HasSubstr("rank 1 (cpu) and rank 0 (cpu)"));
}

TEST(CallsTest, AGroupsCallsAreComparedAmongItsMembers) {
  auto all = three(4);
  all[0].collective["/0.0"].add("barrier");
  all[2].collective["/0.0"].add("barrier");
  EXPECT_EQ(comm::unanswered(all, roster), "");
  all[0].collective["/0.0"].add("barrier");
  EXPECT_THAT(comm::unanswered(all, roster), AllOf(HasSubstr("rank 0 (cpu) called barrier (collective call 1)"),
                                                   HasSubstr("for want of rank 2 (cpu).")));
}

TEST(CallsTest, AMessageWithoutItsOtherSideIsNamed) {
  auto all = three(4);
  all[0].sent[2] = 2;
  all[2].received[0] = 1;
  EXPECT_THAT(comm::unanswered(all, roster), AllOf(HasSubstr("rank 0 (cpu) called send to rank 2 (cpu) 2 times"),
                                                   HasSubstr("once"), HasSubstr("for want of rank 2 (cpu)")));
  all[2].received[0] = 3;
  EXPECT_THAT(comm::unanswered(all, roster), HasSubstr("for want of rank 0 (cpu)"));
}

// A broadcast's root may have completed the call before another rank posts it.
TEST(CallLogTest, KeepsWhatACallChangesUntilAllRanksOfTheProcessHaveCompletedIt) {
  comm::CallLog log({0, 2}, 2);
  const torch::Tensor memory = torch::ones({4});
  const int64_t number = log.add_collective(0, "", "broadcast of float [4]");
  EXPECT_FALSE(log.changes(0, "", number, memory).has_value());
  log.complete(0, "", number);
  ASSERT_EQ(log.add_collective(1, "", "broadcast of float [4]"), number);
  EXPECT_THAT(log.changes(1, "", number, memory), testing::Optional(0));
  log.complete(1, "", number);
  EXPECT_FALSE(log.changes(1, "", number, memory).has_value());
}

}  // namespace calls_test
