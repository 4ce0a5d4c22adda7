// Labels: processes
// Processes that Open MPI's mpirun starts: where no port is given, they find rank 0's.
#include "elastic_fixture.hpp"
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

class MpirunElastic : public Elastic {};

// mpirun would end the job if a process of its own failed. The one that is killed is a child of such a process.
TEST_F(MpirunElastic, AKillChangesNoBit) {
  auto surroundings = without_gnuplot();
  surroundings.program = find_program("mpirun");
  if (surroundings.program.empty()) GTEST_SKIP() << kNotInstalled;
  const std::string port = free_port();
  const Words found_by_path = {"OMPI_MCA_plm_rsh_agent=/bin/false"};  // for other machines, which are not asked
  for (const auto& variable : kAsRoot + found_by_path + Words{"MASTER_ADDR=127.0.0.1", "MASTER_PORT=" + port})
    surroundings.environment.push_back(variable);
  const Words program = Words{"--oversubscribe", "-n", "3", from_environment("LOCKSTEP_PROGRAM")};
  Program killed(program + settings("killed", "cpu") + Words{"--epochs", "20", "--elastic", "2:3"}, surroundings);
  ASSERT_TRUE(killed.wait_for("epoch  2/20"));
  ASSERT_EQ(kill(process_of(1, port), SIGKILL), 0);
  ASSERT_TRUE(killed.wait_for("process 3 has joined"));
  const auto ended = killed.finish();
  ASSERT_EQ(ended.code, 0) << ended.err << ended.out;
  ASSERT_EQ(run_program(settings("undisturbed", "cpu") + Words{"--epochs", "20"}, without_gnuplot()).code, 0);
  expect_same_epochs("killed", 20);
}

}  // namespace mpirun_test
