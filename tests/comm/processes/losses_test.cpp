// Who can be lost, and until when.
#include "comm/processes/losses.hpp"

#include <gmock/gmock.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "support/error_of.hpp"

namespace losses_test {

using namespace lockstep;
using testing::HasSubstr;

comm::Layout two_processes() {
  comm::Layout layout;
  layout.by_process.assign(2, Devices{torch::kCPU});
  return layout;
}

struct Losses : testing::Test {
  const comm::StorePtr store = c10::make_intrusive<c10d::HashStore>();
  comm::Losses mine{store, two_processes(), 1, /*allowed=*/true};
};

TEST_F(Losses, AProcessCanBeLostOnlyWhileTheOthersCanDoWithoutIt) {
  mine.begin();
  EXPECT_FALSE(comm::declare_lost(*store, 1, "gone"));
  mine.release(1);
  EXPECT_TRUE(comm::declare_lost(*store, 1, "gone"));
  EXPECT_THAT(mine.speak_up(), HasSubstr("have gone on without this process, which they took for gone: gone"));
  EXPECT_THAT(mine.bind(1), HasSubstr("gone"));
}

// What it says would else end the run of those that have gone on in the meantime.
TEST_F(Losses, AProcessThatHasSpokenUpCannotBeLost) {
  mine.begin();
  mine.release(1);
  EXPECT_EQ(mine.speak_up(), "");
  EXPECT_FALSE(comm::declare_lost(*store, 1, "gone"));
  EXPECT_FALSE(comm::is_lost(*store, 1));
}

TEST_F(Losses, AForeignCountIsShown) {
  mine.begin();
  store->set("losses", std::string("abc"));
  EXPECT_THAT(error_of([&] { mine.learn(); }), HasSubstr("the store holds \"abc\" under losses, which no process"));
  mine.release(1);
  EXPECT_THAT(error_of([&] { comm::declare_lost(*store, 1, "gone"); }), HasSubstr("\"abc\" under losses"));
}

}  // namespace losses_test
