// The generations of an elastic job: who is in one, whoever changes them at the same time. A run
// outside of a job has none.
#include <gmock/gmock.h>
#include <lockstep/survive/elastic.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "survive/generations.hpp"

#include <algorithm>
#include <thread>
#include <vector>

namespace lockstep {
namespace generations_test {

using comm::Generations;
using testing::ElementsAre;
using testing::IsEmpty;

class GenerationsOfAJob : public testing::Test {
 protected:
  GenerationsOfAJob() { generations_.begin(3); }

  const comm::StorePtr store_ = c10::make_intrusive<c10d::HashStore>();
  Generations generations_{store_};
};

TEST_F(GenerationsOfAJob, TheLostLeaveAndSuccessorsComeLast) {
  EXPECT_THAT(generations_.newest().members, ElementsAre(0, 1, 2));
  const auto without = generations_.lose(0);
  EXPECT_THAT(without.members, ElementsAre(1, 2));
  EXPECT_EQ(without.number, 1);
  EXPECT_EQ(generations_.lose(0).number, 1) << "it is lost once";

  EXPECT_THAT(generations_.join(3).members, ElementsAre(1, 2)) << "the generation has not begun";
  generations_.note_beginning(1);
  const auto with = generations_.join(3);
  EXPECT_THAT(with.members, ElementsAre(1, 2, 3));
  EXPECT_EQ(with.index_of(3), 2);
  EXPECT_EQ(with.index_of(0), std::nullopt);
  EXPECT_THAT(generations_.join(4).members, ElementsAre(1, 2, 3)) << "nobody joins before 3 has come in";
}

TEST_F(GenerationsOfAJob, ThoseWhoLeftGoOnTogether) {
  generations_.leave(0, 0);
  generations_.leave(0, 2);
  EXPECT_THAT(generations_.keep_those_who_left(0).members, ElementsAre(0, 2));
  generations_.leave(0, 1);
  EXPECT_THAT(generations_.keep_those_who_left(0).members, ElementsAre(0, 2)) << "that has been settled";
}

TEST_F(GenerationsOfAJob, AJobIsOverWithItsLastMember) {
  generations_.lose(0);
  generations_.lose(1);
  EXPECT_FALSE(generations_.newest().over);
  EXPECT_TRUE(generations_.lose(2).over);
  generations_.note_beginning(generations_.newest().number);
  EXPECT_THAT(generations_.join(3).members, IsEmpty());
}

TEST_F(GenerationsOfAJob, AMemberHasAHeartOnceItHasBegun) {
  EXPECT_FALSE(generations_.heart_of(1).has_value());
  generations_.beat(1, {17, std::chrono::seconds(2), std::chrono::seconds(5)});
  EXPECT_EQ(generations_.heart_of(1)->beats, 17);
  EXPECT_EQ(generations_.heart_of(1)->silence, std::chrono::seconds(2));
  EXPECT_EQ(generations_.heart_of(1)->most, std::chrono::seconds(5));
}

TEST_F(GenerationsOfAJob, AllChangesCountThatComeAtTheSameTime) {
  generations_.begin(40);
  std::vector<std::jthread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([this, thread] {
      Generations mine(store_);
      for (int member = thread; member < 36; member += 4) mine.lose(member);
    });
  }
  threads.clear();
  EXPECT_THAT(generations_.newest().members, ElementsAre(36, 37, 38, 39));
  EXPECT_EQ(generations_.newest().number, 36);
}

TEST(Generations, WithoutAnElasticJobThereIsNone) {
  int bodies = 0;
  run({c10::kCPU},
      [&](Rank& rank) {
        ++bodies;
        EXPECT_FALSE(regroups(rank));
      },
      {.succession = elastic});
  EXPECT_EQ(bodies, 1);
}

}  // namespace generations_test
}  // namespace lockstep
