// Labels: processes long
// The same program as processes of our own launcher: every collective, training, repeated runs.
#include "job.hpp"
#include "support/split_training.hpp"

namespace processes_test {

using namespace lockstep;
using testing::HasSubstr;

struct Size {
  int processes;
  std::string devices;  // devices of the machine
};

class Processes : public testing::TestWithParam<Size> {};
INSTANTIATE_TEST_SUITE_P(Sizes, Processes,
                         testing::Values(Size{2, "cpu"}, Size{3, "cpu"}, Size{2, "2xcpu"}, Size{2, "4xcpu"},
                                         Size{3, "6xcpu"}),
                         [](const auto& size) {
                           return std::to_string(size.param.processes) + "With" + size.param.devices;
                         });

TEST_P(Processes, HaveEveryCollective) {
  const auto [processes, devices] = GetParam();
  expect_all_ok(run_launched(processes, {"collectives", devices}), processes);
}

TEST_P(Processes, RunSeveralTimesAndInEachOther) {
  const auto [processes, devices] = GetParam();
  expect_all_ok(run_launched(processes, {"runs", devices}), processes);
}

TEST(Processes, TrainLikeThreads) {
  for (const auto& [processes, devices, threads] :
       {std::tuple(2, "cpu", "2xcpu"), std::tuple(3, "3xcpu", "3xcpu"), std::tuple(2, "4xcpu", "4xcpu")}) {
    const ScratchFolder folder;
    const auto as_processes = folder / "processes", as_threads = folder / "threads";
    expect_all_ok(run_launched(processes, {"training", devices, as_processes}), processes);
    expect_all_ok(run_alone({"training", threads, as_threads}), 1);
    // Two numbers have one sum; of more, the order of addition decides the last bits.
    EXPECT_LE(difference(as_processes, as_threads), devices == std::string("cpu") ? 0 : 1e-6) << devices;
  }
}

TEST(Processes, TrainTheSameBitsTwice) {
  const ScratchFolder folder;
  for (const char* name : {"first", "second"}) {
    expect_all_ok(run_launched(2, {"training", "4xcpu", folder / name}), 2);
  }
  EXPECT_EQ(difference(folder / "first", folder / "second"), 0);
}

// With a grain: random small nets, over data and layers.
TEST(Processes, TrainTheBitsOfOneRankWithAGrain) {
  const std::string one = bits_of_random_nets({torch::kCPU}, {});
  for (const auto& [processes, devices, mesh] :
       {std::tuple(3, "cpu", "3x1"), std::tuple(2, "cpu", "1x2"), std::tuple(2, "4xcpu", "2x2")}) {
    const ScratchFolder folder;
    const std::string argument = mesh + std::string(" ") + (folder / "bits").string();
    expect_all_ok(run_launched(processes, {"random_nets", devices, argument}), processes);
    EXPECT_EQ(folder.read("bits"), one) << mesh << " in " << processes << " processes";
  }
}

// The processes start as by srun; there is none here.
TEST(Processes, FindEachOtherInAStepOfSlurm) {
  const auto variables = [](const std::string& rank) {
    return Words{"SLURM_PROCID=" + rank,   "SLURM_LOCALID=" + rank,       "SLURM_NODEID=0",
                 "SLURM_STEP_NUM_TASKS=2", "SLURM_STEP_TASKS_PER_NODE=2", "SLURM_JOB_ID=" + std::to_string(getpid()),
                 "SLURM_STEP_ID=0",        "GLOO_SOCKET_IFNAME=lo"};
  };
  auto surroundings = surroundings_with(variables("1"));
  surroundings.program = ranks_program();
  Program other({"collectives", "4xcpu"}, surroundings);
  const auto first = run_alone({"collectives", "4xcpu"}, variables("0"));
  EXPECT_EQ(first.out, "process 0: ok\n") << first.err;
  EXPECT_EQ(other.finish().out, "process 1: ok\n");
}

TEST(Processes, AProcessOfAWorldOfOneHasThreads) {
  expect_all_ok(run_launched(1, {"collectives", "2xcpu"}), 1);
}

TEST(Processes, ADeviceListThatCannotBeSharedOutIsRefusedWithBothNumbers) {
  const auto job = run_launched(2, {"collectives", "3xcpu"});
  EXPECT_EQ(job.code, 3);
  EXPECT_THAT(job.err,
              HasSubstr("[cpu, cpu, cpu] has 3 entries, which the 2 processes on this machine cannot share out"));
}

}  // namespace processes_test
