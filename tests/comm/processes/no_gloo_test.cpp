// A build without Gloo's headers: threads work, and a launcher's processes are told what lacks.
#include <gmock/gmock.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>
#include <lockstep/ranks/rank.hpp>

#include "support/error_of.hpp"
#include "support/free_port.hpp"

#include <cstdlib>

namespace no_gloo_test {

using namespace lockstep;

TEST(NoGloo, ProcessesAreToldWhatToInstall) {
  const auto variables = [port = free_port()](int rank) {
    setenv("RANK", std::to_string(rank).c_str(), 1);
    setenv("LOCAL_RANK", std::to_string(rank).c_str(), 1);
    for (const char* name : {"WORLD_SIZE", "LOCAL_WORLD_SIZE"}) setenv(name, "2", 1);
    setenv("MASTER_ADDR", "127.0.0.1", 1);
    setenv("MASTER_PORT", port.c_str(), 1);
  };
  const auto error = [] { return error_of([] { run(parse_devices("cpu"), [](Rank&) {}); }); };
  const pid_t other = fork();  // before this process has threads
  variables(other == 0 ? 1 : 0);
  const auto text = error();
  if (other == 0) _exit(0);
  waitpid(other, nullptr, 0);
  for (const char* name : {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"}) unsetenv(name);
  EXPECT_THAT(text, Refused());
}

TEST(NoGloo, RanksAsThreadsNeedNone) {
  run(parse_devices("2xcpu"), [](Rank& rank) {
    const torch::Tensor sum = torch::ones(3) * (rank.index() + 1);
    rank.allreduce(sum);
    EXPECT_EQ(sum[2].item<float>(), 3);
  });
}

}  // namespace no_gloo_test
