// Who can be lost, and until when.
#include "comm/processes/lost_processes.hpp"

#include <gmock/gmock.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "comm/processes/board.hpp"
#include "support/error_of.hpp"

namespace lost_processes_test {

using namespace lockstep;
using testing::HasSubstr;

comm::Roster two_processes() {
  comm::Roster roster;
  roster.by_process.assign(2, Devices{torch::kCPU});
  return roster;
}

struct LostProcesses : testing::Test {
  const comm::StorePtr store = c10::make_intrusive<c10d::HashStore>();
  comm::LostProcesses mine{store, two_processes(), 1, /*allowed=*/true};
};

TEST_F(LostProcesses, AProcessCanBeLostOnlyWhileTheOthersCanDoWithoutIt) {
  mine.begin();
  EXPECT_FALSE(comm::declare_lost(*store, 1, "gone"));
  mine.allow_loss(1);
  EXPECT_TRUE(comm::declare_lost(*store, 1, "gone"));
  EXPECT_THAT(mine.forbid_loss(), HasSubstr("have gone on without this process, which they took for gone: gone"));
  EXPECT_THAT(mine.forbid_loss(1), HasSubstr("gone"));
}

// Otherwise what it says would end the run of those that have gone on in the meantime.
TEST_F(LostProcesses, AProcessThatHasSpokenUpCannotBeLost) {
  mine.begin();
  mine.allow_loss(1);
  EXPECT_EQ(mine.forbid_loss(), "");
  EXPECT_FALSE(comm::declare_lost(*store, 1, "gone"));
  EXPECT_FALSE(comm::is_lost(*store, 1));
}

// Its failure is on its way, while another of its threads begins a training.
TEST_F(LostProcesses, NorOneThatAllowsItAfterThat) {
  mine.begin();
  EXPECT_EQ(mine.forbid_loss(), "");
  mine.allow_loss(1);
  EXPECT_FALSE(comm::declare_lost(*store, 1, "gone"));
}

// It may not know yet that it is out when it fails.
TEST_F(LostProcesses, AProcessThatIsOutEndsNobodysRun) {
  comm::Board others(store, two_processes(), 0, "the launcher", /*keep_going=*/true);
  comm::Board out(store, two_processes(), 1, "the launcher", /*keep_going=*/true);
  others.begin({1, 0});
  out.begin({1, 0});
  out.lost().allow_loss(1);
  ASSERT_TRUE(others.lost().declare(1, "gone"));
  EXPECT_THAT(out.agreed_failure({"rank 1 failed"}).text, HasSubstr("have gone on without this process"));
  EXPECT_EQ(others.failure().text, "");
}

TEST_F(LostProcesses, AForeignCountIsShown) {
  mine.begin();
  store->set("lost_count", std::string("abc"));
  EXPECT_THAT(error_of([&] { mine.refresh(); }),
              HasSubstr("the store holds \"abc\" under lost_count, which no process"));
  mine.allow_loss(1);
  EXPECT_THAT(error_of([&] { comm::declare_lost(*store, 1, "gone"); }), HasSubstr("\"abc\" under lost_count"));
}

}  // namespace lost_processes_test
