// Labels: processes
// Processes that torchrun starts, whose agent keeps the store.
#include "job.hpp"

namespace torchrun_test {

using namespace lockstep;
using testing::HasSubstr;

class Torchrun : public testing::Test {
 protected:
  void SetUp() override {
    if (torchrun_.empty()) GTEST_SKIP() << "no torchrun on PATH (a Python installation of torch has it)";
  }

  Finished run(int processes, const Words& words) const {
    auto surroundings = surroundings_with();
    if (const char* const modules = std::getenv("PYTHONPATH")) {
      surroundings.environment.push_back(std::string("PYTHONPATH=") + modules);
    }
    surroundings.program = torchrun_;
    return run_program(
        Words{"--no-python", "--standalone", "--nproc-per-node", std::to_string(processes), ranks_program()} + words,
        surroundings);
  }

  const std::string torchrun_ = find_program("torchrun");
};

TEST_F(Torchrun, StartsRanksThatHaveEveryCollective) {
  expect_all_ok(run(2, {"collectives", "cpu"}), 2);
  expect_all_ok(run(3, {"collectives", "cpu"}), 3);
}

TEST_F(Torchrun, ARankThatThrowsIsNamed) {
  const auto job = run(2, {"throws", "cpu"});
  EXPECT_NE(job.code, 0);
  EXPECT_THAT(job.err, HasSubstr("process 1: rank 1 (cpu): out of luck"));
}

}  // namespace torchrun_test
