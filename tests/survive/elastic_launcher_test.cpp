// ElasticLauncher: what it says when a job has ended.
#include <gmock/gmock.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "survive/elastic_launcher.hpp"

#include <string>

namespace lockstep {
namespace elastic_launcher_test {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

class AnElasticLauncher : public testing::Test, public comm::LaunchedProcesses {
 protected:
  void start(int, int) override {}
  void kill(int) override {}
  void say(const std::string& text) override { said_ += text + "\n"; }

  std::string why(const std::string& newest) {
    said_.clear();
    launcher_.say_why([&](const std::string& folder) { return newest.empty() ? "" : folder + "/" + newest; });
    return said_;
  }

  std::string said_;
  const comm::StorePtr store_ = c10::make_intrusive<c10d::HashStore>();
  comm::ElasticLauncher launcher_{
      store_, {.name = "job", .processes = 2, .restarts = 3}, *this, [](int, int, const comm::ProcessEnd&) {
        return false;
      }};
  const comm::ProcessEnd killed_{.failed = true, .stopped = false, .how = "it was killed"};
};

TEST_F(AnElasticLauncher, WhenAllWithTheStateAreKilledSaysSoAndNamesTheNewestCheckpoint) {
  comm::Generations(store_, "job").take_part("/runs/a");
  EXPECT_TRUE(launcher_.note_end(0, killed_, /*killed=*/true));
  EXPECT_EQ(why("epoch-0001"), "") << "the other goes on";
  EXPECT_FALSE(launcher_.note_end(1, killed_, /*killed=*/true));
  EXPECT_THAT(why("epoch-0001"), AllOf(HasSubstr("all processes that had the state of the training are gone"),
                                       HasSubstr("it goes on from its newest checkpoint, /runs/a/epoch-0001")));
  EXPECT_THAT(why(""), HasSubstr("Start the job again with `resume` auto (keep.resume in a fit()): it begins anew"));
}

TEST_F(AnElasticLauncher, DoesNotSayOfAProgramThatHasNotBegunThatItNeverTakesPart) {
  EXPECT_TRUE(launcher_.note_end(0, killed_, /*killed=*/true));
  EXPECT_FALSE(launcher_.note_end(1, killed_, /*killed=*/true));
  EXPECT_THAT(why("epoch-0001"),
              AllOf(HasSubstr("was killed before the program took part in the elastic job"),
                    HasSubstr("start the job again, since no step is lost"), Not(HasSubstr("takes no part"))));
}

}  // namespace elastic_launcher_test
}  // namespace lockstep
