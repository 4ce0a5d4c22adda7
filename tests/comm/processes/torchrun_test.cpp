// Labels: processes
// Processes that torchrun starts, whose agent keeps the store.
#include "elastic_fixture.hpp"
#include "job.hpp"

namespace torchrun_test {

using namespace lockstep;
using testing::HasSubstr;
using testing::Not;

const char* const kNotInstalled = "no torchrun on PATH (a Python installation of torch has it)";

// Where Python finds torch.
Words modules() {
  const char* const folders = std::getenv("PYTHONPATH");
  return folders == nullptr ? Words{} : Words{std::string("PYTHONPATH=") + folders};
}

class Torchrun : public testing::Test {
 protected:
  void SetUp() override {
    if (torchrun_.empty()) GTEST_SKIP() << kNotInstalled;
  }

  Finished run(int processes, const Words& words) const {
    auto surroundings = surroundings_with(modules());
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

class TorchrunElastic : public Elastic {};

// Its agent sees no failure when a child of its worker is killed. When the worker itself is, it ends all and starts
// them again, and the run goes on from its newest checkpoint.
TEST_F(TorchrunElastic, KillsOfChildrenAndOfAWorkerChangeNoBit) {
  auto surroundings = without_gnuplot();
  surroundings.program = find_program("torchrun");
  if (surroundings.program.empty()) GTEST_SKIP() << kNotInstalled;
  for (const auto& variable : modules()) surroundings.environment.push_back(variable);
  const Words torchrun = {"--no-python", "--standalone", "--nproc-per-node", "3", "--max-restarts", "1"};
  Program killed(torchrun + Words{from_environment("LOCKSTEP_PROGRAM")} + settings("killed", "cpu") + kEndless +
                     Words{"--elastic", "2:3", "--resume", "auto"},
                 surroundings);
  const auto goes_on = [&] {
    const size_t epochs = metrics("killed").size();
    return comes_true([&] { return metrics("killed").size() > epochs; });
  };
  ASSERT_TRUE(killed.wait_for("epoch      2/"));
  ASSERT_EQ(kill(process_of(1), SIGKILL), 0);
  ASSERT_TRUE(killed.wait_for("process 3 has joined"));
  ASSERT_EQ(kill(process_of(0), SIGKILL), 0);  // who keeps the run
  ASSERT_TRUE(killed.wait_for("process 4 has joined"));
  EXPECT_TRUE(goes_on());
  pid_t worker = -1;
  std::istringstream(io::stat_after_name("/proc/" + std::to_string(process_of(2)))).ignore(2) >> worker;
  ASSERT_GT(worker, 1);
  ASSERT_EQ(kill(worker, SIGKILL), 0);
  ASSERT_TRUE(killed.wait_for("goes on from"));
  EXPECT_TRUE(goes_on());
  killed.send(SIGTERM);
  const auto ended = killed.finish();
  EXPECT_THAT(ended.err, Not(HasSubstr("error:")));
  EXPECT_THAT(leftovers(), testing::Each(HasSubstr("torchelastic_")));  // torchrun's own, which it forgets
  expect_bits_of_peace("killed");
}

}  // namespace torchrun_test
