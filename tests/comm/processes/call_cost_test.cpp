// Labels: processes
// What a call between processes costs the rank that makes it: it does not depend on the groups that the rank knows.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "base/seconds_since.hpp"
#include "comm/processes/process_backend.hpp"
#include "comm/processes/process_work.hpp"

#include <chrono>
#include <memory>
#include <string>
#include <vector>

namespace call_cost_test {

using namespace lockstep;
using namespace std::chrono_literals;

constexpr int kGroups = 5'000, kCalls = 200;

// A rank's calls are for the others once the rank has waited for a second. A copy of them takes a millisecond here.
TEST(CallCost, DoesNotGrowWithTheGroupsOfTheRank) {
  const comm::Roster roster{{Devices(1, torch::kCPU)}};
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto monitor = std::make_shared<comm::Monitor>(
      store, roster, 0, comm::Monitor::Options{.timeout = 60s, .silence = {60s, 60s}, .host = "the test"});
  const auto group = comm::make_gloo_group({.store = store, .rank = 0, .size = 1, .timeout = 60s}, "127.0.0.1");
  const auto backend = c10::make_intrusive<comm::ProcessBackend>(0, comm::Members{.ranks = {0}}, group, store, monitor,
                                                                 std::make_shared<comm::OpenWorks>(), 60s);
  const auto seconds_of_calls = [&] {
    std::vector<torch::Tensor> values{torch::ones({4})};
    const auto begin = thread_seconds();
    for (int call = 0; call < kCalls; ++call) backend->allreduce(values, {})->wait();
    return thread_seconds() - begin;
  };
  seconds_of_calls();
  const double before = seconds_of_calls();
  for (int number = 0; number < kGroups; ++number) {
    const std::string name = "a group of some ranks, number " + std::to_string(number);
    monitor->log().join(0, name);
    for (int call = 0; call < 8; ++call) monitor->log().add_collective(0, name, "allreduce(sum) of float [1024, 1024]");
  }
  EXPECT_LT(seconds_of_calls(), 5 * before + 0.01);
}

}  // namespace call_cost_test
