// Where a store listens.
#include "comm/rendezvous.hpp"

#include <gmock/gmock.h>
#include <torch/torch.h>

#include "comm/sockets.hpp"
#include "error_of.hpp"

#include <chrono>

namespace {

using namespace lockstep;
using testing::AllOf;
using testing::HasSubstr;

bool answers(const std::string& address, int port) {
  return comm::answers(address, port, std::chrono::steady_clock::now() + std::chrono::seconds(5));
}

// All of 127.0.0.0/8 is this machine: a store that listened on every interface would answer there too.
TEST(Rendezvous, AStoreListensAtItsAddressAlone) {
  const auto store = comm::host_store("127.0.0.1", 0);
  EXPECT_GT(store->getPort(), 1023);
  EXPECT_TRUE(answers("127.0.0.1", store->getPort()));
  EXPECT_FALSE(answers("127.0.0.2", store->getPort()));
}

TEST(Rendezvous, APortThatIsTakenIsNamed) {
  const auto store = comm::host_store("127.0.0.1", 0);
  EXPECT_THAT(error_of([&] { comm::host_store("127.0.0.1", store->getPort()); }),
              AllOf(HasSubstr("127.0.0.1, port " + std::to_string(store->getPort())), HasSubstr("MASTER_PORT")));
}

TEST(Rendezvous, LoopbackForSeveralMachinesIsRefused) {
  comm::LaunchEnvironment launch{.launcher = "torchrun or lockstep launch", .rank = 0, .world_size = 4};
  launch.local_world_size = 2;
  launch.address = "localhost";
  launch.port = 29400;
  EXPECT_THAT(error_of([&] { comm::Rendezvous(launch, std::chrono::seconds(1)); }),
              AllOf(HasSubstr("MASTER_ADDR=localhost means this machine itself"), HasSubstr("4 processes")));
}

}  // namespace
