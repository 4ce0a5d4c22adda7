// ElasticAgent and ElasticLaunch: what the launchers of an elastic job on several machines tell each other.
#include <gmock/gmock.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "comm/meeting/elastic_agent.hpp"
#include "comm/meeting/elastic_launch.hpp"

#include <chrono>
#include <functional>
#include <thread>
#include <vector>

namespace lockstep {
namespace elastic_agent_test {

using comm::ElasticAgent;
using comm::ElasticLaunch;
using comm::Generations;
using comm::Order;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::SizeIs;
using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

// Three machines with two processes each, and room for a fourth.
class AnElasticAgent : public testing::Test {
 protected:
  // Until the launch has heard what it is to hear, while these agents live.
  ElasticLaunch::Heard hear(const std::vector<ElasticAgent*>& agents,
                            const std::function<bool(const ElasticLaunch::Heard&)>& enough) {
    for (const auto end = Clock::now() + 20s; Clock::now() < end; std::this_thread::sleep_for(5ms)) {
      for (auto* const agent : agents) {
        for (const auto& order : agent->orders()) orders_.push_back(order);
      }
      auto heard = launch_.hear();
      if (enough(heard)) return heard;
    }
    ADD_FAILURE() << "it was not heard";
    return {};
  }

  void begin() {
    hear({&first_, &second_}, [&](auto&) { return launch_.absent_nodes().empty(); });
    EXPECT_THAT(launch_.begin(), SizeIs(6));
    generations_.take_part();
    generations_.note_beginning(0);
  }

  static std::vector<int> started(const std::vector<Order>& orders) {
    std::vector<int> members;
    for (const auto& order : orders) {
      if (order.kind == Order::Kind::start) members.push_back(order.member);
    }
    return members;
  }

  const comm::StorePtr store_ = c10::make_intrusive<c10d::HashStore>();
  ElasticLaunch launch_{store_, "job", 6, 10, {.agent_silence = {300ms, 300ms}}, {.nodes = 3, .most = 4}};
  Generations generations_{store_, "job"};
  ElasticAgent first_{store_, "job", 1, {2, 4}}, second_{store_, "job", 2, {2, 4}};
  std::vector<Order> orders_;
};

TEST_F(AnElasticAgent, StartsItsOwnProcesses) {
  begin();
  EXPECT_THAT(started(first_.orders()), ElementsAre(2, 3));
  EXPECT_THAT(started(second_.orders()), ElementsAre(4, 5));
}

TEST_F(AnElasticAgent, ThatIsSilentLosesAllOfItsProcessesAtOnceAndComesAgain) {
  begin();
  const auto heard = hear({&first_}, [](auto& now) { return !now.lost.empty(); });
  ASSERT_THAT(heard.lost, SizeIs(1));
  EXPECT_EQ(heard.lost[0].node, 2);
  EXPECT_TRUE(heard.lost[0].go_on);
  EXPECT_THAT(heard.lost[0].members, ElementsAre(4, 5));
  EXPECT_EQ(generations_.newest().number, 1) << "they leave in one change";
  EXPECT_THAT(generations_.newest().members, ElementsAre(0, 1, 2, 3));

  generations_.note_beginning(1);
  EXPECT_THAT(launch_.successors(), IsEmpty()) << "nobody can start them";
  const auto orders = second_.orders();
  ASSERT_FALSE(orders.empty());
  EXPECT_EQ(orders.back().kind, Order::Kind::out);
  second_.come();
  hear({&first_, &second_}, [](auto& now) { return !now.came.empty(); });
  EXPECT_THAT(launch_.successors(), SizeIs(2));
  EXPECT_THAT(started(second_.orders()), ElementsAre(6, 7));
}

// Its processes may still say how they ended.
TEST_F(AnElasticAgent, OneLossCountsOnce) {
  begin();
  second_.note_end(4, {.failed = true, .stopped = false, .how = "killed"}, /*killed=*/true, 137);
  std::this_thread::sleep_for(400ms);
  std::vector<int> lost;
  hear({&first_}, [&](auto& now) {
    for (const auto& report : now.ended) {
      EXPECT_TRUE(launch_.note_end(report.member, report.end, report.killed));
      lost.push_back(report.member);
    }
    for (const auto& node : now.lost) lost.insert(lost.end(), node.members.begin(), node.members.end());
    return !now.lost.empty() && now.lost[0].node == 2;
  });
  EXPECT_THAT(lost, testing::UnorderedElementsAre(4, 5));
}

TEST_F(AnElasticAgent, ThatIsLostBeforeTheJobBeginsGetsItsProcessesOnce) {
  hear({&first_, &second_}, [&](auto&) { return launch_.absent_nodes().empty(); });
  const auto heard = hear({&second_}, [](auto& now) { return !now.lost.empty(); });
  ASSERT_THAT(heard.lost, SizeIs(1));
  EXPECT_EQ(heard.lost[0].node, 1);
  EXPECT_THAT(heard.lost[0].members, IsEmpty());
  EXPECT_EQ(first_.orders().back().kind, Order::Kind::out);
  first_.come();
  begin();
  EXPECT_THAT(started(orders_), IsEmpty());
  EXPECT_THAT(launch_.successors(), IsEmpty());
  EXPECT_THAT(started(first_.orders()), ElementsAre(2, 3));
  EXPECT_THAT(generations_.newest().members, ElementsAre(0, 1, 2, 3, 4, 5));
}

TEST_F(AnElasticAgent, TakesAKillForALossBeforeAnybodyTakesPart) {
  hear({&first_, &second_}, [&](auto&) { return launch_.absent_nodes().empty(); });
  launch_.begin();
  EXPECT_TRUE(first_.note_end(2, {.failed = true, .stopped = false, .how = "killed"}, /*killed=*/true, 137));
  EXPECT_FALSE(first_.note_end(3, {.failed = true, .stopped = false, .how = "failed"}, /*killed=*/false, 7));
}

TEST_F(AnElasticAgent, ThatLeavesLosesTheProcessesWhoseEndItHasNotReported) {
  begin();
  second_.note_end(4, {.failed = true, .stopped = false, .how = "killed", .lacked_memory = true}, /*killed=*/true, 137);
  second_.leave(143);
  const auto heard = hear({&first_}, [](auto& now) { return !now.lost.empty(); });
  ASSERT_THAT(heard.ended, SizeIs(1));
  EXPECT_EQ(heard.ended[0].member, 4);
  EXPECT_TRUE(heard.ended[0].end.lacked_memory);
  EXPECT_TRUE(heard.ended[0].killed);
  EXPECT_EQ(heard.ended[0].code, 137);
  ASSERT_THAT(heard.lost, SizeIs(1));
  EXPECT_THAT(heard.lost[0].members, ElementsAre(5));
  EXPECT_EQ(heard.lost[0].code, 143);
  EXPECT_THAT(generations_.newest().members, ElementsAre(0, 1, 2, 3, 4));
}

TEST_F(AnElasticAgent, WithATakenNumberIsTurnedAway) {
  begin();
  ElasticAgent third(store_, "job", 2, {2, 4});
  const auto heard = hear({&first_, &second_}, [](auto& now) { return !now.refused.empty(); });
  EXPECT_THAT(heard.refused, ElementsAre(HasSubstr("two agents say that they are node 2")));
  const auto orders = third.orders();
  ASSERT_THAT(orders, SizeIs(1));
  EXPECT_EQ(orders[0].kind, Order::Kind::over);
  EXPECT_EQ(orders[0].code, 1);
}

// Between two looks at the store: the later one is let in, and the other one must not wait for an answer.
TEST_F(AnElasticAgent, ThatComesAtOnceWithAnotherOneOfItsNumberIsAnsweredToo) {
  ElasticAgent later(store_, "job", 2, {2, 4});
  const auto heard = hear({&first_, &later}, [](auto& now) { return !now.refused.empty(); });
  EXPECT_THAT(heard.refused, ElementsAre(HasSubstr("two agents say that they are node 2")));
  const auto orders = second_.orders();
  ASSERT_THAT(orders, SizeIs(1));
  EXPECT_EQ(orders[0].kind, Order::Kind::over);
}

TEST_F(AnElasticAgent, OfOneMoreMachineGetsProcessesThatJoin) {
  begin();
  ElasticAgent third(store_, "job", 3, {2, 4});
  hear({&first_, &second_, &third}, [](auto& now) { return !now.came.empty(); });
  EXPECT_THAT(launch_.successors(), SizeIs(2));
  EXPECT_THAT(started(third.orders()), ElementsAre(6, 7));
}

TEST_F(AnElasticAgent, WhoseProcessIsOneTooManyIsNotToldToStartAnother) {
  begin();
  ElasticAgent third(store_, "job", 3, {2, 4});
  hear({&first_, &second_, &third}, [](auto& now) { return !now.came.empty(); });
  EXPECT_THAT(launch_.successors(), SizeIs(2));
  generations_.note_surplus(6);  // and member 7 fails by itself, before it has joined
  for (const int member : {6, 7})
    third.note_end(member, {.failed = true, .stopped = false, .how = "it ended with exit code 1"}, false, 1);
  const auto heard = hear({&first_, &second_, &third}, [](auto& now) { return !now.ended.empty(); });
  ASSERT_THAT(heard.ended, SizeIs(2));
  for (const auto& report : heard.ended)
    EXPECT_TRUE(launch_.note_end(report.member, report.end, report.killed)) << "the others go on";
  const auto starts = launch_.successors();
  ASSERT_THAT(starts, SizeIs(1));
  EXPECT_EQ(starts[0].place, 7);
}

TEST_F(AnElasticAgent, LearnsThatTheJobIsOver) {
  begin();
  launch_.end(7, "node 0 has had enough");
  for (auto* const agent : {&first_, &second_}) {
    const auto orders = agent->orders();
    ASSERT_FALSE(orders.empty());
    EXPECT_EQ(orders.back().kind, Order::Kind::over);
    EXPECT_EQ(orders.back().code, 7);
    EXPECT_EQ(orders.back().why, "node 0 has had enough");
    agent->leave(7);
  }
  EXPECT_FALSE(launch_.agents_are_gone());
  launch_.hear();
  EXPECT_TRUE(launch_.agents_are_gone());
}

}  // namespace elastic_agent_test
}  // namespace lockstep
