// Tests what a process makes of what it finds in the store.
#include "comm/meeting/meeting.hpp"

#include <gmock/gmock.h>
#include <torch/torch.h>
#include <nlohmann/json.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "support/error_of.hpp"
#include "support/free_port.hpp"

#include <chrono>
#include <string>
#include <thread>
#include <vector>

namespace meeting_test {

using namespace lockstep;

comm::LaunchEnvironment process(int index) {
  comm::LaunchEnvironment launch{.launcher = "a test", .rank = index, .world_size = 2};
  launch.job = "test";
  return launch;
}

const comm::WaitLimit limit{std::chrono::seconds(20)};

comm::StorePtr first_run_in(const comm::StorePtr& store) {
  return c10::make_intrusive<c10d::PrefixStore>(comm::job_prefix("test") + comm::run_prefix(1), store);
}

TEST(Meeting, AForeignIntroductionIsShown) {
  for (const std::string text :
       {"abc", "[]", R"({"configuration": "x", "host": "y", "machine": 0, "devices": ["z"], "ids": [[]]})",
        R"({"configuration": "x", "host": "y", "machine": 0, "devices": [], "ids": []})"}) {
    const comm::StorePtr store = c10::make_intrusive<c10d::HashStore>();
    store->set("config/1", text);
    EXPECT_THAT(error_of([&] { comm::meet(*store, process(0), {torch::kCPU}, "x", limit); }), Fails(Error::machine));
  }
}

// Process 0 is on the CPU, and meets two processes whose ranks have these GPUs.
comm::Roster met_by(const std::vector<std::string>& gpus_of_1, const std::string& gpu_of_2,
                    const std::string& unshared_of_2, const std::string& unshared_of_1 = "") {
  const auto introduction = [](const std::vector<std::string>& gpus, const std::string& unshared) {
    const std::vector<std::string> devices(gpus.size(), "cuda:0");
    return nlohmann::json{
        {"configuration", "x"}, {"host", "y"}, {"devices", devices}, {"gpus", gpus}, {"unshared", unshared}}
        .dump();
  };
  const comm::StorePtr store = c10::make_intrusive<c10d::HashStore>();
  store->set("config/1", introduction(gpus_of_1, unshared_of_1));
  store->set("config/2", introduction({gpu_of_2}, unshared_of_2));
  auto first = process(0);
  first.world_size = 3;
  return comm::meet(*store, first, {torch::kCPU}, "x", limit);
}

TEST(Meeting, RanksShareAGpuWhereNcclLetsAllOfThem) {
  EXPECT_FALSE(met_by({"one"}, "another", "").shares_gpus);
  EXPECT_FALSE(met_by({"one"}, "another", "NCCL is too old").shares_gpus);
  EXPECT_TRUE(met_by({"one"}, "one", "").shares_gpus);
  EXPECT_THAT(error_of([] { met_by({"one"}, "one", "NCCL is too old"); }), Fails(Error::refused));
  EXPECT_THAT(error_of([] { met_by({"one"}, "one", "", "NCCL is too old"); }), Fails(Error::refused));
  EXPECT_FALSE(met_by({""}, "", "NCCL is too old").shares_gpus);
  EXPECT_TRUE(met_by({"one", "one"}, "another", "").shares_gpus);
  EXPECT_THAT(error_of([] { met_by({"one", "one"}, "another", "", "NCCL is too old"); }), Fails(Error::refused));
}

TEST(Meeting, ForeignCountsAreShown) {
  const comm::StorePtr store = c10::make_intrusive<c10d::HashStore>();
  store->set("came/0", std::string("abc"));
  EXPECT_THAT(error_of([&] { comm::meet(*store, process(0), {torch::kCPU}, "x", limit); }), Fails(Error::machine));

  auto launch = process(0);
  launch.local_world_size = 2;
  launch.address = "127.0.0.1";
  launch.port = std::stoi(free_port());
  const comm::Rendezvous host(launch, limit);
  for (const char* foreign : {"abc", "-1", "1x", ""}) {
    store->set("farewells", std::string(foreign));
    EXPECT_TRUE(comm::farewell(*store, host, std::chrono::seconds(1)).is(Error::machine)) << foreign;
  }
}

// Each process of the other job learns it at once, and none may end the job that has met.
TEST(Meeting, AnotherJobOfAnotherSizeLeavesTheFirstOneAlone) {
  const comm::StorePtr store = c10::make_intrusive<c10d::HashStore>();
  std::thread other([&] { comm::meet(*store, process(1), {torch::kCPU}, "x", limit); });
  comm::meet(*store, process(0), {torch::kCPU}, "x", limit);
  other.join();
  for (const int rank : {0, 2, 3}) {
    auto newcomer = process(rank);
    newcomer.world_size = 4;
    EXPECT_THROW(comm::meet(*store, newcomer, {torch::kCPU}, "y", {std::chrono::seconds(1)}), comm::NobodyMissed)
        << rank;
  }
}

TEST(Meeting, SaysWhatToDoWhereOneProcessAloneHasABuildId) {
  const std::string with = "program x, build 1234, 2 processes", without = "program x, 2 processes",
                    any = "program x, any build (LOCKSTEP_MIXED_BUILDS=1), 2 processes";
  for (const auto& [first, second] :
       {std::pair(with, without), std::pair(without, with), std::pair(any, without), std::pair(with, any)}) {
    const comm::StorePtr store = c10::make_intrusive<c10d::HashStore>();
    std::thread other([&, &theirs = second] {
      EXPECT_THROW(comm::meet(*store, process(1), {torch::kCPU}, theirs, limit), lockstep::Error);
    });
    EXPECT_THAT(error_of([&, &ours = first] { comm::meet(*store, process(0), {torch::kCPU}, ours, limit); }),
                Fails(Error::difference));
    other.join();
  }
}

// The launcher's own end would be that of all processes.
TEST(Meeting, ALauncherNamesAProcessThatHasEndedAlsoThen) {
  const comm::StorePtr store = c10::make_intrusive<c10d::HashStore>();
  const auto run = first_run_in(store);
  std::thread other([&] { comm::meet(*run, process(1), {torch::kCPU}, "x", limit); });
  comm::meet(*run, process(0), {torch::kCPU}, "x", limit);
  other.join();
  run->set("config/0", std::string("abc"));
  comm::announce_end(store, process(1), {.failed = true, .how = "it was killed"});
  EXPECT_EQ(comm::failure_from(run->get_to_str("failure")).text, "process 1 of 2 is gone: it was killed");
}

// A launcher saw the process stopped: that counts, and not what the process said at its end.
TEST(Meeting, WhoWaitsForAProcessThatWasStoppedIsStoppedToo) {
  const auto wait_for_one_that = [](bool was_stopped) {
    const comm::StorePtr store = c10::make_intrusive<c10d::HashStore>();
    comm::announce_end(store, process(1), {.failed = true, .stopped = was_stopped, .how = "stopped by request"});
    comm::meet(*first_run_in(store), process(0), {torch::kCPU}, "x", limit);
  };
  EXPECT_THROW(wait_for_one_that(true), lockstep::Stopped);
  try {
    wait_for_one_that(false);
    FAIL() << "it waits for nobody";
  } catch (const lockstep::Stopped&) {
    FAIL() << "by its words";
  } catch (const lockstep::Error& error) {
    EXPECT_EQ(error.cause(), lockstep::Error::death);
  }
}

}  // namespace meeting_test
