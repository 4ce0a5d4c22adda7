// Tests what launchers say in the environment, and what is made of it.
#include "comm/meeting/launch_environment.hpp"

#include <gmock/gmock.h>
#include <torch/torch.h>

#include "support/error_of.hpp"

#include <map>

namespace launch_environment_test {

using namespace lockstep;
using comm::LaunchEnvironment;

using Variables = std::map<std::string, std::string>;

std::optional<LaunchEnvironment> read(const Variables& variables) {
  return comm::read_launch_environment([&](const char* name) {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  });
}

Variables with(Variables variables, const Variables& more) {
  for (const auto& [name, value] : more) variables[name] = value;
  return variables;
}

Variables without(Variables variables, const std::string& name) {
  variables.erase(name);
  return variables;
}

const Variables torchrun = {{"RANK", "5"},
                            {"WORLD_SIZE", "8"},
                            {"LOCAL_RANK", "1"},
                            {"LOCAL_WORLD_SIZE", "4"},
                            {"MASTER_ADDR", "node01"},
                            {"MASTER_PORT", "29400"},
                            {"GROUP_RANK", "1"},
                            {"TORCHELASTIC_USE_AGENT_STORE", "True"}};
const Variables open_mpi = {{"OMPI_COMM_WORLD_RANK", "2"},
                            {"OMPI_COMM_WORLD_SIZE", "3"},
                            {"OMPI_COMM_WORLD_LOCAL_RANK", "2"},
                            {"OMPI_COMM_WORLD_LOCAL_SIZE", "3"},
                            {"PMIX_NAMESPACE", "1234"}};
const Variables slurm = {{"SLURM_PROCID", "4"},
                         {"SLURM_STEP_NUM_TASKS", "5"},
                         {"SLURM_LOCALID", "0"},
                         {"SLURM_NODEID", "2"},
                         {"SLURM_JOB_ID", "77"},
                         {"SLURM_STEP_ID", "0"},
                         {"SLURM_STEP_TASKS_PER_NODE", "2(x2),1"},
                         {"SLURM_STEP_NODELIST", "rack[03-04,09],other"}};

TEST(LaunchEnvironment, IsNothingWithoutALauncher) {
  EXPECT_FALSE(read({}));
  EXPECT_FALSE(read({{"MASTER_ADDR", "node01"}, {"MASTER_PORT", "29400"}}));  // clusters set these for everybody
  EXPECT_FALSE(read({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "4"}}));         // a batch script
  EXPECT_FALSE(read({{"RANK", ""}, {"WORLD_SIZE", ""}}));
}

TEST(LaunchEnvironment, ReadsTorchruns) {
  const auto launch = read(torchrun).value();
  EXPECT_EQ(launch.rank, 5);
  EXPECT_EQ(launch.world_size, 8);
  EXPECT_EQ(launch.local_rank, 1);
  EXPECT_EQ(launch.local_world_size, 4);
  EXPECT_EQ(launch.address, "node01");
  EXPECT_EQ(launch.port, 29400);
  EXPECT_TRUE(launch.agent_store);
  EXPECT_FALSE(read(without(torchrun, "TORCHELASTIC_USE_AGENT_STORE"))->agent_store);
  EXPECT_TRUE(launch.tcp_store);
  const auto of_lockstep = with(torchrun, {{"LOCKSTEP_STORE_PORT", "29400"}, {"LOCKSTEP_JOB_KEY_FILE", "/a/key"}});
  EXPECT_FALSE(read(of_lockstep)->tcp_store);
  EXPECT_EQ(read(of_lockstep)->key_file, "/a/key");
  EXPECT_TRUE(read(with(of_lockstep, {{"MASTER_PORT", "29401"}}))->tcp_store);  // torchrun within lockstep launch
  EXPECT_FALSE(read(without(torchrun, "TORCHELASTIC_USE_AGENT_STORE"))->tcp_store);
  // The agent's store keeps what earlier attempts wrote.
  EXPECT_NE(read(with(torchrun, {{"TORCHELASTIC_RESTART_COUNT", "1"}}))->job, launch.job);
}

TEST(LaunchEnvironment, ReadsOpenMpis) {
  const auto launch = read(open_mpi).value();
  EXPECT_EQ(launch.rank, 2);
  EXPECT_EQ(launch.world_size, 3);
  EXPECT_EQ(launch.local_world_size, 3);
  EXPECT_EQ(launch.address, "");
  EXPECT_EQ(launch.port, 0);
  EXPECT_EQ(launch.job, "mpirun-1234");
  EXPECT_FALSE(launch.agent_store);
  // Several machines need an address.
  const auto several = with(open_mpi, {{"OMPI_COMM_WORLD_LOCAL_SIZE", "1"}, {"OMPI_COMM_WORLD_LOCAL_RANK", "0"}});
  EXPECT_THAT(error_of([&] { read(several); }), Refused());
  EXPECT_EQ(read(with(several, {{"MASTER_ADDR", "10.0.0.1"}, {"MASTER_PORT", "1"}}))->address, "10.0.0.1");
}

TEST(LaunchEnvironment, ReadsSlurms) {
  const auto launch = read(slurm).value();
  EXPECT_EQ(launch.rank, 4);
  EXPECT_EQ(launch.world_size, 5);
  EXPECT_EQ(launch.local_rank, 0);
  EXPECT_EQ(launch.local_world_size, 1);
  EXPECT_EQ(launch.address, "rack03");
  EXPECT_EQ(launch.port, 15077);
  EXPECT_EQ(read(with(slurm, {{"SLURM_NODEID", "1"}}))->local_world_size, 2);
}

TEST(LaunchEnvironment, TakesTheInnermostLauncher) {
  EXPECT_EQ(read(with(slurm, torchrun))->rank, 5);
  EXPECT_EQ(read(with(open_mpi, torchrun))->rank, 5);
  EXPECT_EQ(read(with(slurm, open_mpi))->rank, 2);
}

TEST(LaunchEnvironment, AllowsMixedBuildsIfAsked) {
  for (const auto& launcher : {torchrun, open_mpi, slurm}) {
    EXPECT_FALSE(read(launcher)->mixed_builds);
    EXPECT_FALSE(read(with(launcher, {{"LOCKSTEP_MIXED_BUILDS", "0"}}))->mixed_builds);
    EXPECT_TRUE(read(with(launcher, {{"LOCKSTEP_MIXED_BUILDS", "1"}}))->mixed_builds);
    EXPECT_THAT(error_of([&] { read(with(launcher, {{"LOCKSTEP_MIXED_BUILDS", "yes"}})); }), Refused());
  }
}

TEST(LaunchEnvironment, KnowsAnElasticJob) {
  EXPECT_EQ(read(torchrun)->member, -1);
  EXPECT_EQ(read(with(torchrun, {{"LOCKSTEP_ELASTIC_MEMBER", ""}}))->member, -1);
  const auto launch = read(with(torchrun, {{"LOCKSTEP_ELASTIC_MEMBER", "17"}, {"LOCKSTEP_ELASTIC_MIN", "2"}}));
  EXPECT_EQ(launch->member, 17);
  EXPECT_EQ(launch->fewest, 2);
  EXPECT_THAT(error_of([&] { read(with(torchrun, {{"LOCKSTEP_ELASTIC_MEMBER", "17"}})); }), Refused());
}

TEST(LaunchEnvironment, NamesWhatIsMissing) {
  for (const auto& [variables, count] : {std::pair(torchrun, 6), std::pair(open_mpi, 4)}) {
    int missing = 0;
    for (const auto& [name, value] : variables) {
      const auto text = error_of([&, &all = variables, &name = name] { read(without(all, name)); });
      if (text == "(no error)") continue;
      EXPECT_THAT(text, Refused());
      ++missing;
    }
    EXPECT_EQ(missing, count);
  }
  EXPECT_THAT(error_of([] { read(without(slurm, "SLURM_LOCALID")); }), Refused());
}

TEST(LaunchEnvironment, NamesWhatContradicts) {
  const auto text = [](const Variables& variables) { return error_of([&] { read(variables); }); };
  EXPECT_THAT(text(with(torchrun, {{"RANK", "8"}})), Refused());
  EXPECT_THAT(text(with(torchrun, {{"LOCAL_RANK", "4"}})), Refused());
  EXPECT_THAT(text(with(torchrun, {{"LOCAL_WORLD_SIZE", "9"}})), Refused());
  EXPECT_THAT(text(with(torchrun, {{"RANK", "one"}})), Refused());
  EXPECT_THAT(text(with(torchrun, {{"RANK", "-1"}})), Refused());
  EXPECT_THAT(text(with(torchrun, {{"MASTER_PORT", "70000"}})), Refused());
  EXPECT_THAT(text(with(torchrun, {{"MASTER_PORT", "0"}})), Refused());
}

TEST(ShareOut, GivesEqualPartsInOrder) {
  const Devices devices{{torch::kCUDA, 0}, {torch::kCUDA, 1}, {torch::kCUDA, 2}, {torch::kCUDA, 3}};
  EXPECT_EQ(comm::share_out(devices, 1, 2), (Devices{devices[2], devices[3]}));
  EXPECT_EQ(comm::share_out(devices, 2, 4), (Devices{devices[2]}));
  EXPECT_EQ(comm::share_out(devices, 0, 1), devices);
  EXPECT_EQ(comm::share_out({torch::kCPU}, 2, 3), Devices{torch::kCPU});
  EXPECT_THAT(error_of([&] { comm::share_out(devices, 0, 3); }), Refused());
  EXPECT_EQ(comm::share_out({devices[0]}, 1, 2), Devices{devices[0]});  // each process sees a GPU of its own
}

}  // namespace launch_environment_test
