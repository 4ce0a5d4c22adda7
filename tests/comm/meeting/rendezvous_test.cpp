// Where a store listens.
#include "comm/meeting/rendezvous.hpp"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <ifaddrs.h>
#include <torch/torch.h>
#include <unistd.h>

#include "comm/meeting/sockets.hpp"
#include "support/error_of.hpp"
#include "support/free_port.hpp"
#include "support/scratch_folder.hpp"

#include <chrono>
#include <cstdlib>
#include <future>
#include <memory>
#include <string>

namespace rendezvous_test {

using namespace lockstep;

bool answers(const std::string& address, int port) {
  return comm::answers(address, port, std::chrono::steady_clock::now() + std::chrono::seconds(5));
}

// All of 127.0.0.0/8 is this machine: a store that listened on every interface would answer there too.
TEST(Rendezvous, AStoreListensAtItsAddressAlone) {
  const auto store = comm::host_store("127.0.0.1", 0, {});
  EXPECT_GT(store.port, 1023);
  EXPECT_TRUE(answers("127.0.0.1", store.port));
  EXPECT_FALSE(answers("127.0.0.2", store.port));
}

TEST(Rendezvous, APortThatIsTakenIsNamed) {
  const auto store = comm::host_store("127.0.0.1", 0, {});
  EXPECT_THAT(error_of([&] { comm::host_store("127.0.0.1", store.port, {}); }), Fails(Error::machine));
}

TEST(Rendezvous, EverywhereMeansEveryAddress) {
  const auto listener = comm::listen_everywhere(0);
  EXPECT_TRUE(answers("127.0.0.1", listener.port));
  EXPECT_TRUE(answers("127.0.0.2", listener.port));
  close(listener.fd);
}

comm::LaunchEnvironment place(int rank, const std::string& address, int port) {
  comm::LaunchEnvironment launch{.launcher = "torchrun or lockstep launch", .rank = rank, .world_size = 2};
  launch.address = address;
  launch.port = port;
  launch.job = "rendezvous-test-" + std::to_string(getpid());
  return launch;
}

// One that other machines would use; empty: none.
std::string address_on_a_network() {
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) return "";
  std::string address;
  for (const ifaddrs* entry = list; entry != nullptr && address.empty(); entry = entry->ifa_next) {
    if (entry->ifa_addr == nullptr || entry->ifa_addr->sa_family != AF_INET) continue;
    char text[INET_ADDRSTRLEN] = {};
    inet_ntop(AF_INET, &reinterpret_cast<sockaddr_in*>(entry->ifa_addr)->sin_addr, text, sizeof text);
    if (!comm::is_loopback(text)) address = text;
  }
  freeifaddrs(list);
  return address;
}

// Debian's /etc/hosts gives a machine's own name the address 127.0.1.1, which other machines do not have for it.
TEST(Rendezvous, TheNameOfRank0sMachineMayMeanLoopbackThere) {
  char name[256] = {};
  gethostname(name, sizeof name - 1);
  const std::string outer = address_on_a_network();
  if (outer.empty()) GTEST_SKIP() << "this machine has no network";
  try {
    comm::numeric_address(name);
  } catch (const Error& error) {
    GTEST_SKIP() << "this machine does not know its own name: " << error.what();
  }
  const int port = std::stoi(free_port());
  const auto join = [port](int rank, const std::string& address) {
    return std::async(std::launch::async, [=] {
      return std::make_unique<comm::Rendezvous>(place(rank, address, port), comm::WaitLimit{std::chrono::seconds(20)});
    });
  };
  auto first = join(0, name), second = join(1, outer);
  const auto host = first.get(), client = second.get();
  EXPECT_TRUE(host->hosts_store());
  EXPECT_FALSE(comm::is_loopback(host->local_address())) << host->local_address();
  EXPECT_EQ(client->local_address(), outer);
  host->connect("test")->set("key", "value");
  EXPECT_EQ(client->connect("test")->get_to_str("key"), "value");
}

TEST(Rendezvous, WhoWaitsForAnotherMachineInVainIsToldWhatToSet) {
  char name[256] = {};
  gethostname(name, sizeof name - 1);
  try {
    if (!comm::is_loopback(comm::numeric_address(name))) GTEST_SKIP() << "this machine's name is of a network";
  } catch (const Error& error) {
    GTEST_SKIP() << "this machine does not know its own name: " << error.what();
  }
  const int port = std::stoi(free_port());
  EXPECT_THAT(error_of([&] { comm::Rendezvous(place(0, name, port), {std::chrono::milliseconds(200)}); }),
              Fails(Error::late));
}

TEST(Rendezvous, OnOneMachineThePortIsLeftInAFileUntilAllHaveReadIt) {
  const ScratchFolder folder;
  setenv("TMPDIR", folder.path().c_str(), 1);
  const auto join = [](int rank) {
    return std::async(std::launch::async, [=] {
      auto launch = place(rank, "", 0);
      launch.local_rank = rank;
      launch.local_world_size = 2;
      return std::make_unique<comm::Rendezvous>(launch, comm::WaitLimit{std::chrono::seconds(20)});
    });
  };
  auto first = join(0);
  const auto host = first.get();
  host->take_note_away();  // too early
  EXPECT_EQ(folder.names().size(), 1u);
  const auto client = join(1).get();
  host->take_note_away();
  EXPECT_THAT(folder.names(), testing::IsEmpty());
  unsetenv("TMPDIR");
}

TEST(Rendezvous, LoopbackForSeveralMachinesIsRefused) {
  comm::LaunchEnvironment launch{.launcher = "torchrun or lockstep launch", .rank = 0, .world_size = 4};
  launch.local_world_size = 2;
  launch.address = "localhost";
  launch.port = 29400;
  EXPECT_THAT(error_of([&] { comm::Rendezvous(launch, {std::chrono::seconds(1)}); }), Refused());
}

}  // namespace rendezvous_test
