// Tests what ranks of several processes say of themselves, and what the others conclude.
#include "comm/processes/rank_state.hpp"
#include "comm/processes/blame.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "support/error_of.hpp"

#include <optional>

namespace rank_state_test {

using namespace lockstep;
using comm::Calls;
using comm::OpenCall;
using comm::RankState;
using testing::AllOf;
using testing::HasSubstr;

comm::Roster roster_of(int processes) {
  comm::Roster roster;
  roster.by_process.assign(processes, Devices{torch::kCPU});
  return roster;
}

Calls made(int world_size, const std::vector<std::string>& collectives) {
  Calls calls(world_size);
  for (const auto& text : collectives) calls.collective[""].add(text);
  return calls;
}

RankState waits(int rank, Calls calls, int64_t number) {
  return {RankState::Kind::waits, calls, {.rank = rank, .number = number, .text = calls.of("").text_of(number)}};
}

Caught contradiction(const OpenCall& call, const std::vector<RankState>& states, int processes) {
  const comm::Failure found = comm::contradiction(call, states, roster_of(processes));
  return {found.text, found.empty() ? std::nullopt : std::optional(found.data)};
}

Caught early_return(int rank, const Calls& calls, const std::vector<RankState>& states) {
  const comm::Failure found = comm::early_return(rank, calls, states, roster_of(3));
  return {found.text, found.empty() ? std::nullopt : std::optional(found.data)};
}

RankState receives(int rank, Calls calls, int peer) {
  ++calls.received[peer];
  OpenCall call{.rank = rank, .text = "recv", .peer = peer, .messages = calls.received[peer], .message = "message"};
  return {RankState::Kind::waits, calls, call};
}

TEST(RankStateTest, SurvivesTheStore) {
  const RankState state = receives(1, made(3, {"barrier", "allreduce"}), 2);
  const RankState read = RankState::from_text(state.to_text(), 3);
  EXPECT_EQ(read.kind, RankState::Kind::waits);
  EXPECT_EQ(read.call.peer, 2);
  EXPECT_EQ(read.call.messages, 1);
  EXPECT_EQ(read.calls.of("").text_of(1), "allreduce");
  EXPECT_EQ(RankState::from_text(RankState().to_text(), 3).kind, RankState::Kind::busy);
}

TEST(RankStateTest, IsReadStrictly) {
  EXPECT_ANY_THROW(RankState::from_text("abc", 3));
  EXPECT_ANY_THROW(RankState::from_text("[]", 3));
  EXPECT_ANY_THROW(RankState::from_text(receives(1, made(4, {}), 3).to_text(), 3));
}

TEST(RankStateTest, RanksThatWaitForEachOtherAreFound) {
  const std::vector<RankState> circle = {receives(0, Calls(3), 1), receives(1, Calls(3), 2), receives(2, Calls(3), 0)};
  EXPECT_THAT(comm::standstill(circle, roster_of(3)),
              AllOf(HasSubstr("wait for each other"), HasSubstr("rank 0 (cpu) waits in recv (message) for rank 1"),
                    HasSubstr("rank 2 (cpu) waits in recv (message) for rank 0")));
  const std::vector<RankState> mixed = {waits(0, made(2, {"barrier"}), 0), receives(1, Calls(2), 0)};
  EXPECT_THAT(comm::standstill(mixed, roster_of(2)), HasSubstr("rank 1 (cpu) waits in recv (message) for rank 0"));
}

TEST(RankStateTest, RanksThatSomebodyCanSetGoingDoNot) {
  std::vector<RankState> states = {receives(0, Calls(3), 1), receives(1, Calls(3), 2), RankState()};
  EXPECT_EQ(comm::standstill(states, roster_of(3)), "");  // rank 2 may send yet
  states[2] = receives(2, Calls(3), 0);
  states[2].call.polled = true;
  EXPECT_EQ(comm::standstill(states, roster_of(3)), "");
  states[2].call.polled = false;
  states[2].calls.sent[1] = 1;  // rank 1's message is on its way
  EXPECT_EQ(comm::standstill(states, roster_of(3)), "");
  const std::vector<RankState> same = {waits(0, made(2, {"barrier"}), 0), waits(1, made(2, {"barrier"}), 0)};
  EXPECT_EQ(comm::standstill(same, roster_of(2)), "");
}

TEST(RankStateTest, ACallThatAnotherRankDidNotWaitForContradictsToo) {
  const auto later = made(2, {"barrier", "allreduce(max)", "barrier"});
  const std::vector<RankState> states = {waits(0, made(2, {"barrier", "allreduce(sum)"}), 1), waits(1, later, 2)};
  EXPECT_THAT(contradiction(states[0].call, states, 2), Fails(Error::difference, {0, 1}));
  EXPECT_EQ(contradiction(waits(0, made(2, {"barrier"}), 0).call, states, 2), "");
}

// Ranks 0 and 2 of three, in a group.
RankState waits_in_group(int rank, const std::vector<std::string>& collectives) {
  Calls calls(3);
  for (const auto& text : collectives) calls.collective["/0.0"].add(text);
  const auto number = static_cast<int64_t>(collectives.size()) - 1;
  return {RankState::Kind::waits,
          calls,
          {.rank = rank, .number = number, .among = {"/0.0", {0, 2}}, .text = collectives.back()}};
}

TEST(RankStateTest, AGroupsCallsConcernItsMembersOnly) {
  std::vector<RankState> states = {waits_in_group(0, {"barrier"}), waits(1, made(3, {"allreduce"}), 0),
                                   RankState::from_text(waits_in_group(2, {"allgather"}).to_text(), 3)};
  EXPECT_THAT(contradiction(states[0].call, states, 3), Fails(Error::difference, {0, 2}));
  states[2] = waits_in_group(2, {"barrier"});
  EXPECT_EQ(contradiction(states[0].call, states, 3), "");
  EXPECT_EQ(comm::missing_ranks(states[0].call, states, roster_of(3)), "");
  EXPECT_EQ(comm::standstill(states, roster_of(3)), "");  // 0 and 2 will go on, and may then join rank 1
  states[2] = waits(2, made(3, {"allreduce"}), 0);
  EXPECT_THAT(comm::standstill(states, roster_of(3)),
              HasSubstr("rank 2 (cpu) waits in allreduce (collective call 0) for rank 0 (cpu)"));
  EXPECT_THAT(comm::missing_ranks(states[0].call, states, roster_of(3)),
              "rank 2 (cpu), which waits in allreduce "
              "(collective call 0)");
}

// Ranks over NCCL say nothing while they wait.
TEST(RankStateTest, AnEarlyReturnIsFoundByTheCallsAlone) {
  const Calls mine = made(3, {"barrier", "allreduce"});
  const auto found = [&](const RankState& other) { return early_return(0, mine, {RankState(), other, RankState()}); };
  EXPECT_EQ(found({RankState::Kind::busy, made(3, {})}), "");
  EXPECT_EQ(found({RankState::Kind::returned, mine}), "");
  EXPECT_THAT(found({RankState::Kind::returned, made(3, {"barrier"})}), Fails(Error::difference, {1}));
  Calls stranger = mine;
  stranger.collective.erase("");  // the rank seems to be no member of the group
  EXPECT_EQ(found({RankState::Kind::returned, stranger}), "");
  Calls sender = mine;
  ++sender.sent[0];
  EXPECT_EQ(found({RankState::Kind::returned, sender}), "");  // an unread message waits until all have returned
  EXPECT_THAT(early_return(1, sender, {{RankState::Kind::returned, mine}, RankState(), RankState()}),
              Fails(Error::difference, {0}));
}

}  // namespace rank_state_test
