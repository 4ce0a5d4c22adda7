// Labels: processes program thorough
// lockstep train as processes: what it trains is what threads train, whatever is exchanged, and a stopped run goes on
// with the bits of one that was not.
#include <tuple>

#include "cli/cli_fixture.hpp"
#include "job.hpp"

namespace process_training_test {

using namespace lockstep;

class ProcessTraining : public Cli {
 protected:
  // Each process one rank.
  void train_as_processes(int processes, const Words& words) const {
    const auto job = run_program(
        Words{"launch", "-n", std::to_string(processes), from_environment("LOCKSTEP_PROGRAM")} + words, surroundings());
    ASSERT_EQ(job.code, 0) << job.err;
    ASSERT_THAT(job.err, testing::MatchesRegex("(lockstep: warning: [0-9]+ ranks share [0-9]+ cores? [^\n]*\n)?"));
  }

  std::filesystem::path weights(const std::string& name) const { return work_ / "runs" / name / "model.safetensors"; }
};

struct Way {
  Words flags;
  double tolerance;  // tolerance of three ranks, which Gloo adds in another order than one process does
};

const Words small = {"--model", "mlp", "--width", "0.125", "--lr", "0.05"};

TEST_F(ProcessTraining, IsThatOfThreadsWhateverIsExchanged) {
  for (const auto& [flags, tolerance] :
       {Way{{}, 1e-6}, Way{{"--compress", "powersgd"}, 1e-5}, Way{{"--compress", "bf16"}, 5e-3},
        Way{{"--sync-every", "3", "--outer-lr", "0.7", "--outer-momentum", "0.9"}, 1e-6},
        // a reduce-scatter adds in the order of the ranks everywhere
        Way{{"--zero-stage", "1", "--optimizer", "adam"}, 0}, Way{{"--zero-stage", "3", "--momentum", "0.9"}, 0}}) {
    for (const int ranks : {2, 3}) {
      const std::string name = std::to_string(ranks) + (flags.empty() ? "" : flags[0] + flags[1]);
      SCOPED_TRACE(name);
      const auto as = [&, &flags = flags](const std::string& kind, const std::string& devices) {
        return train(small + flags + Words{"--name", kind + name, "--devices", devices});
      };
      const auto threads = run_program(as("threads", std::to_string(ranks) + "xcpu"), surroundings());
      ASSERT_EQ(threads.code, 0) << threads.err;
      train_as_processes(ranks, as("processes", "cpu"));
      // Two numbers have one sum.
      EXPECT_LE(difference(weights("processes" + name), weights("threads" + name)), ranks == 2 ? 0 : tolerance);
    }
  }
}

TEST_F(ProcessTraining, StopsEverywhereInTheStepWhoseLossIsNotFinite) {
  const auto job = run_program(Words{"launch", "-n", "2", from_environment("LOCKSTEP_PROGRAM")} +
                                   train(small + Words{"--lr", "1e30", "--devices", "cpu", "--name", "wild"}),
                               surroundings());
  EXPECT_EQ(job.code, 3);
  EXPECT_THAT(job.err, testing::HasSubstr("lockstep: error: epoch 1, step 2: the loss of rank 0, 1 is not finite, and "
                                          "the run ends; no run is kept"));
  EXPECT_THAT(job.err, testing::ContainsRegex("lockstep launch: rank . ended with exit code 3 "));
  EXPECT_FALSE(std::filesystem::exists(work_ / "runs" / "wild"));
}

// In a network whose gradients do not come in the order of registration, reversed: their places in the buckets are
// learnt in the first step, and Gloo's order of addition follows the places.
TEST_F(ProcessTraining, GoesOnWithTheSameBits) {
  for (const Words& flags : {Words{"--momentum", "0.9"}, Words{"--compress", "powersgd"}, Words{"--zero-stage", "2"}}) {
    SCOPED_TRACE(flags[0]);
    train_as_processes(3, train(flags + Words{"--devices", "cpu", "--name", "whole" + flags[0], "--checkpoint-every",
                                              "3", "--keep-last", "100"}));
    for (const std::string position : {"epoch-0000-step-000003", "epoch-0001"}) {
      SCOPED_TRACE(position);
      const std::string again = position + flags[0];
      train_as_processes(3, {"train", "--resume", "runs/whole" + flags[0] + "/checkpoints/" + position + ".safetensors",
                             "--name", again});
      EXPECT_EQ(difference(weights(again), weights("whole" + flags[0])), 0);
    }
  }
}

}  // namespace process_training_test
