// Labels: simulated
// The program on simulated GPUs, with the parts that a build for CUDA has: recorded steps, and NCCL's stand-in.
#include "cli/cli_fixture.hpp"

namespace simulated_program_test {

using SimulatedProgram = lockstep::Cli;
using lockstep::Finished;
using lockstep::run_program;
using testing::HasSubstr;
using testing::IsEmpty;

TEST_F(SimulatedProgram, TrainsWithRecordedStepsAsWithOthers) {
  int runs = 0;
  for (const std::string devices : {"cuda:0,cuda:1", "2xcuda:0"}) {
    SCOPED_TRACE(devices);
    std::vector<double> losses;
    for (const std::string graph : {"", "=false"}) {
      const std::string name = std::to_string(++runs);
      const Finished run =
          run_program(train({"--devices", devices, "--cuda-graph" + graph, "--name", name}), surroundings());
      ASSERT_EQ(run.code, 0) << run.err;
      EXPECT_THAT(run.err, IsEmpty());
      EXPECT_THAT(run.out, HasSubstr(graph.empty() ? "CUDA graph        yes" : "CUDA graph        no"));
      losses.push_back(metrics(name).back().train_loss);
    }
    EXPECT_NEAR(losses[0], losses[1], 1e-4);
  }
}

}  // namespace simulated_program_test
