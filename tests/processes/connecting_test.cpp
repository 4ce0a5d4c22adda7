// What goes wrong while processes connect: one dies, or is slow, at each connection that it makes (faulty_connect.cpp).
#include "job.hpp"

#include "comm/sockets.hpp"

#include <chrono>
#include <future>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace connecting_test {

using namespace lockstep;
using namespace std::chrono_literals;
using testing::AnyOf;
using testing::HasSubstr;
using testing::Not;
using FileClock = std::filesystem::file_time_type::clock;

struct Fault {
  int processes;
  std::string devices;
  int rank;
  int at;                         // the rank's n-th connection
  bool launched = true;           // or without a launcher, the store in process 0
  std::string milliseconds = {};  // that it takes; empty: the process is killed
};

struct Outcome {
  bool came_about = false;               // or the rank made fewer connections
  std::vector<Finished> processes = {};  // of a launcher's job: the launcher, with the output of all
  FileClock::duration after_fault = {};  // until all had ended
  std::string text = {};
};

Program start(const Words& words, Surroundings surroundings) {
  surroundings.program = ranks_program();
  return {words, surroundings};
}

// Its outputs are read to the end, so nothing of it is left behind.
Outcome outcome_of(const Fault& fault) {
  const ScratchFolder folder;
  Words variables = {"LD_PRELOAD=" + from_environment("LOCKSTEP_FAULTY_CONNECT"),
                     "FAULT_RANK=" + std::to_string(fault.rank), "FAULT_AT=" + std::to_string(fault.at),
                     "FAULT_FILE=" + (folder / "fault").string()};
  if (!fault.milliseconds.empty()) variables.push_back("FAULT_MILLISECONDS=" + fault.milliseconds);
  const Words words = {"connects", fault.devices};
  Outcome outcome;
  if (fault.launched) {
    outcome.processes.push_back(run_launched(fault.processes, words, variables));
  } else {
    const std::string port = free_port();
    const auto environment = [&](int rank) { return surroundings_with(as_rank(rank, 2, port, "20") + variables); };
    Program host = start(words, environment(0));
    while (!comm::answers("127.0.0.1", std::stoi(port), std::chrono::steady_clock::now() + 1s) &&
           !std::filesystem::exists(folder / "fault")) {
      std::this_thread::sleep_for(10ms);
    }
    Program other = start(words, environment(1));
    outcome.processes.push_back(host.finish());
    outcome.processes.push_back(other.finish());
  }
  const auto end = FileClock::now();
  outcome.came_about = std::filesystem::exists(folder / "fault");
  if (outcome.came_about) outcome.after_fault = end - std::filesystem::last_write_time(folder / "fault");
  outcome.text = std::to_string(fault.processes) + " processes, rank " + std::to_string(fault.rank) +
                 " at connection " + std::to_string(fault.at) + ", " + std::to_string(outcome.after_fault / 1ms) +
                 " ms:\n";
  for (const auto& process : outcome.processes) outcome.text += process.err;
  return outcome;
}

// At each connection that the rank makes from the `at`th on; some jobs side by side, since they mostly wait.
std::vector<Outcome> at_each_connection(Fault fault) {
  constexpr int side_by_side = 4;
  std::vector<Outcome> outcomes;
  for (bool more = true; more;) {
    std::vector<std::future<Outcome>> running;
    for (int job = 0; job < side_by_side; ++job) {
      running.push_back(std::async(std::launch::async, outcome_of, fault));
      ++fault.at;
    }
    for (auto& job : running) {
      auto outcome = job.get();
      if (outcome.came_about)
        outcomes.push_back(std::move(outcome));
      else
        more = false;
    }
  }
  return outcomes;
}

class Connecting : public testing::Test {
 protected:
  void SetUp() override {
    if (std::getenv("LOCKSTEP_FAULTY_CONNECT") == nullptr) GTEST_SKIP() << "not with sanitizers";
  }
};

// Of two that connect to each other, Gloo picks the one that calls connect().
TEST_F(Connecting, AProcessThatDiesIsNamedByTheOthersSoon) {
  for (const Fault& fault : {Fault{2, "cpu", 1, 1}, Fault{3, "cpu", 1, 5}, Fault{2, "4xcpu", 0, 5}}) {
    const auto outcomes = at_each_connection(fault);
    EXPECT_FALSE(outcomes.empty());
    const std::string rank = std::to_string(fault.rank);
    for (const auto& outcome : outcomes) {
      const Finished& job = outcome.processes[0];
      EXPECT_EQ(job.code, 128 + SIGKILL) << outcome.text;
      for (int process = 0; process < fault.processes; ++process) {
        if (process == fault.rank) continue;
        const std::string name = "process " + std::to_string(process) + ": ";
        EXPECT_THAT(job.err, AnyOf(HasSubstr(name + "the process of rank"),
                                   HasSubstr(name + "process " + rank + " of " + std::to_string(fault.processes) +
                                             " did not come to run(): it was ended by signal 9")))
            << outcome.text;
      }
      EXPECT_THAT(job.err, Not(HasSubstr("ending the others")));
      EXPECT_LT(outcome.after_fault, 4s) << outcome.text;
    }
  }
}

// Nobody sees the process end. Its first connections are those before the meeting: one that has not come may as well
// never have been started.
TEST_F(Connecting, WithoutALauncherToo) {
  int faults = 0;
  for (const int victim : {0, 1}) {
    for (const auto& outcome : at_each_connection({2, "cpu", victim, 6, false})) {
      ++faults;
      EXPECT_THAT(outcome.processes[1 - victim].err,
                  HasSubstr("process " + std::to_string(1 - victim) + ": the process of rank " +
                            std::to_string(victim) + " (cpu) is gone"));
      EXPECT_LT(outcome.after_fault, 5s) << outcome.text;
    }
  }
  EXPECT_GT(faults, 0);
}

TEST_F(Connecting, AProcessThatIsSlowIsNotTakenForDead) {
  for (const auto& outcome : at_each_connection({2, "cpu", 1, 4, true, "1500"})) {
    EXPECT_EQ(outcome.processes[0].code, 0) << outcome.text;
  }
}

}  // namespace connecting_test
