// Labels: processes program thorough
// lockstep train that is killed at a call which changes its run folder (faulty_files.cpp): it goes on to the same bits.
#include "cli/cli_fixture.hpp"
#include "running_job.hpp"

#include <random>
#include <string>
#include <vector>

namespace killed_writes_test {

using namespace lockstep;
namespace fs = std::filesystem;

class KilledWrites : public Cli {
 protected:
  void SetUp() override {
    if (std::getenv("LOCKSTEP_FAULTY_FILES") == nullptr) GTEST_SKIP() << "not with sanitizers";
  }

  // Up to the `at`th call; all are counted in `count`.
  Finished run_until(int at, const ScratchFolder& folder, const ScratchFolder& count) const {
    auto with_fault = surroundings();
    with_fault.folder = folder.path();
    for (const auto& variable :
         {"LD_PRELOAD=" + from_environment("LOCKSTEP_FAULTY_FILES"), std::string("FAULT_FOLDER=runs/a"),
          "FAULT_AT=" + std::to_string(at), "FAULT_FILE=" + (count / "calls").string()}) {
      with_fault.environment.push_back(variable);
    }
    return run_program(words_, with_fault);
  }

  Finished go_on(const ScratchFolder& folder) const {
    auto undisturbed = surroundings();
    undisturbed.folder = folder.path();
    return run_program(words_, undisturbed);
  }

  const std::vector<std::string> words_ =
      train({"--devices", "cpu", "--model", "mlp", "--width", "0.125", "--lr", "0.05", "--checkpoint-every", "4",
             "--keep-last", "2", "--resume", "auto", "--name", "a"});
};

const char* const kWeights = "runs/a/model.safetensors";

TEST_F(KilledWrites, GoesOnToTheSameBitsAndLeavesNoTemporaryFile) {
  const ScratchFolder whole, count;
  const auto undisturbed = run_until(0, whole, count);
  ASSERT_EQ(undisturbed.code, 0) << undisturbed.err;
  const std::string expected = whole.read(kWeights);
  const int calls = static_cast<int>(count.read("calls.count").size());
  ASSERT_GT(calls, 40);

  constexpr int kKills = 16;
  std::mt19937 random(9);
  std::vector<int> moments;  // one in each part of the run
  for (int i = 0; i < kKills; ++i) {
    moments.push_back(std::uniform_int_distribution<int>(1 + i * calls / kKills, (i + 1) * calls / kKills)(random));
  }
  side_by_side(kKills, [&](int i) {
    SCOPED_TRACE("call " + std::to_string(moments[i]) + " of " + std::to_string(calls));
    const ScratchFolder folder, ignored;
    EXPECT_EQ(run_until(moments[i], folder, ignored).signal, SIGKILL);
    const auto resumed = go_on(folder);
    EXPECT_EQ(resumed.code, 0) << resumed.err;
    EXPECT_EQ(folder.read(kWeights), expected);
    for (const auto& entry : fs::recursive_directory_iterator(folder.path())) {
      EXPECT_NE(entry.path().extension(), ".tmp") << entry.path();
    }
  });
}

}  // namespace killed_writes_test
