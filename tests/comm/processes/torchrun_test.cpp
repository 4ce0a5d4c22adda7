// Labels: processes
// Processes that torchrun starts, whose agent keeps the store.
#include "elastic_fixture.hpp"
#include "job.hpp"

#include <cstdlib>
#include <fstream>
#include <iterator>

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

// -1: none has both variables.
pid_t process_with(const std::string& one, const std::string& other) {
  for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
    const int pid = std::atoi(entry.path().filename().c_str());
    std::ifstream file(entry.path() / "environ", std::ios::binary);
    const std::string all = '\0' + std::string{std::istreambuf_iterator<char>(file), {}};
    const auto has = [&](const std::string& variable) { return all.find('\0' + variable + '\0') != std::string::npos; };
    if (pid > 0 && has(one) && has(other)) return pid;
  }
  return -1;
}

class TorchrunStartsAgain : public Elastic {};

// When a worker is killed, the agent ends all and starts them again. The run goes on from the newest checkpoint.
TEST_F(TorchrunStartsAgain, AKillOfAWorkerChangesNoBit) {
  auto surroundings = watched();
  surroundings.program = find_program("torchrun");
  if (surroundings.program.empty()) GTEST_SKIP() << kNotInstalled;
  for (const auto& variable : modules()) surroundings.environment.push_back(variable);
  const Words torchrun = {"--no-python", "--standalone", "--nproc-per-node", "3", "--max-restarts", "1"};
  Program killed(torchrun + Words{from_environment("LOCKSTEP_PROGRAM")} + settings("killed", "cpu") + kEndless +
                     Words{"--resume", "auto"},
                 surroundings);
  ASSERT_TRUE(killed.wait_for("epoch      2/"));
  const pid_t worker = process_with("RANK=1", left_.variables().front());
  ASSERT_GT(worker, 1);
  ASSERT_EQ(kill(worker, SIGKILL), 0);
  ASSERT_TRUE(killed.wait_for("goes on from"));
  const size_t epochs = metrics("killed").size();
  EXPECT_TRUE(comes_true([&] { return metrics("killed").size() > epochs; }));
  killed.send(SIGTERM);
  const auto ended = killed.finish();
  EXPECT_THAT(ended.err, Not(HasSubstr("error:")));
  EXPECT_THAT(leftovers(), testing::Each(HasSubstr("torchelastic_")));  // torchrun's own, which it forgets
  expect_bits_of_peace("killed");
}

}  // namespace torchrun_test
