// Labels: processes long
// Processes that Open MPI's mpirun starts: where no port is given, they find rank 0's.
#include "job.hpp"

namespace mpirun_test {

using namespace lockstep;
using testing::HasSubstr;

const char* const kNotInstalled = "mpirun is not installed (Debian: openmpi-bin)";
const Words kAsRoot = {"OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"};

class Mpirun : public testing::Test {
 protected:
  void SetUp() override {
    if (mpirun_.empty()) GTEST_SKIP() << kNotInstalled;
  }

  Finished run(int processes, const Words& words) const {
    const ScratchFolder temporary;  // where rank 0's process leaves its port
    auto surroundings = surroundings_with(kAsRoot + Words{"TMPDIR=" + temporary.path().string()});
    surroundings.program = mpirun_;
    auto job =
        run_program(Words{"--oversubscribe", "-n", std::to_string(processes), ranks_program()} + words, surroundings);
    for (const auto& left : std::filesystem::directory_iterator(temporary.path()))
      EXPECT_NE(left.path().extension(), ".port") << left;
    return job;
  }

  const std::string mpirun_ = find_program("mpirun");
};

TEST_F(Mpirun, StartsRanksThatHaveEveryCollective) {
  expect_all_ok(run(2, {"collectives", "cpu"}), 2);
  expect_all_ok(run(3, {"collectives", "cpu"}), 3);
  expect_all_ok(run(2, {"collectives", "4xcpu"}), 2);
}

TEST_F(Mpirun, ARankThatThrowsIsNamedByAll) {
  const auto job = run(3, {"throws", "cpu"});
  EXPECT_NE(job.code, 0);
  EXPECT_THAT(job.err, HasSubstr("rank 1 (cpu): out of luck"));
}

}  // namespace mpirun_test
