// Whose slice a rank keeps beside its own, by the machines of all ranks.
#include "data_parallel/partners.hpp"

#include <gmock/gmock.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <vector>

namespace partners_test {

using lockstep::kept_ranks;
using testing::ElementsAre;

// How many slices a machine has both copies of.
int lost_with(int machine, const std::vector<int>& machines) {
  const auto kept = kept_ranks(machines);
  int lost = 0;
  for (size_t rank = 0; rank < kept.size(); ++rank) {
    const bool keeper = machines[rank] == machine, owner = machines[static_cast<size_t>(kept[rank])] == machine;
    if (keeper && owner) ++lost;
  }
  return lost;
}

TEST(Partners, AreTheRanksBeforeWhereMachinesTellNothing) {
  EXPECT_THAT(kept_ranks({4}), ElementsAre(0));
  EXPECT_THAT(kept_ranks({0, 0}), ElementsAre(1, 0));
  EXPECT_THAT(kept_ranks({0, 0, 0, 0}), ElementsAre(3, 0, 1, 2));
  EXPECT_THAT(kept_ranks({7, 2, 9}), ElementsAre(2, 0, 1));  // each on its own
}

TEST(Partners, AreOnOtherMachines) {
  EXPECT_THAT(kept_ranks({0, 0, 2, 2}), ElementsAre(2, 3, 0, 1));
  EXPECT_THAT(kept_ranks({0, 1, 0, 1}), ElementsAre(1, 0, 3, 2));
  for (const auto& machines :
       std::vector<std::vector<int>>{{0, 0, 1, 1}, {1, 0, 0, 1}, {0, 0, 1, 2}, {2, 0, 1, 0, 2}, {0, 0, 0, 1, 1, 2}}) {
    for (const int machine : {0, 1, 2}) EXPECT_EQ(lost_with(machine, machines), 0) << testing::PrintToString(machines);
  }
}

// Of 2 + 1 and of 3 + 1 ranks the smaller machine can be lost, and as many slices as the other ranks can keep are safe.
TEST(Partners, OfAMachineWithMoreThanHalfAreOnOthersAsFarAsTheseReach) {
  for (const auto& machines : std::vector<std::vector<int>>{{0, 0, 1}, {0, 1, 0}, {1, 0, 0}}) {
    EXPECT_EQ(lost_with(1, machines), 0);
    EXPECT_EQ(lost_with(0, machines), 1);
  }
  for (const auto& machines : std::vector<std::vector<int>>{{0, 0, 0, 1}, {0, 1, 0, 0}, {1, 0, 0, 0}}) {
    EXPECT_EQ(lost_with(1, machines), 0);
    EXPECT_EQ(lost_with(0, machines), 2);
  }
}

TEST(Partners, AreTheBestThatThereCanBeForAnyMachines) {
  std::mt19937 random(1);
  for (int round = 0; round < 2000; ++round) {
    std::vector<int> machines(1 + random() % 12);
    for (int& machine : machines) machine = static_cast<int>(random() % 4);
    const auto kept = kept_ranks(machines);
    const int count = static_cast<int>(machines.size());
    EXPECT_EQ(std::set<int>(kept.begin(), kept.end()).size(), machines.size()) << "a slice has one keeper";
    std::map<int, int> ranks;
    for (const int machine : machines) ++ranks[machine];
    for (const auto& [machine, of_it] : ranks) {
      EXPECT_EQ(lost_with(machine, machines), std::max(0, of_it - (count - of_it))) << testing::PrintToString(machines);
    }
    for (int rank = 0; count > 1 && rank < count; ++rank) EXPECT_NE(kept[static_cast<size_t>(rank)], rank);
  }
}

}  // namespace partners_test
