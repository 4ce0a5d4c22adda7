// Labels: processes program long thorough
// What goes wrong while processes connect: one dies, or is slow, at each connection that it makes (faulty_connect.cpp).
#include "running_job.hpp"

#include <cerrno>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

namespace connecting_test {

using namespace lockstep;
using namespace std::chrono_literals;
using testing::AnyOf;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;
using FileClock = std::filesystem::file_time_type::clock;

constexpr Seconds kPatience = 20s;  // for a process that comes

struct Fault {
  int processes;
  std::string devices;
  std::string to;                 // "store": the connections of `rank`; "ranks": all that processes make to each other
  bool launched = true;           // or without a launcher, the store in process 0
  std::string milliseconds = {};  // milliseconds that the process sleeps then; empty: it is killed
  int rank = 1;
};

struct Outcome {
  int victim = -1;                       // the fault came about in this process; -1: in none
  int connections = 0;                   // connections that were counted
  std::vector<Finished> processes = {};  // in a launcher's job the launcher alone, with the output of all
  FileClock::duration after_fault = {};  // until all had ended
  Words leftovers = {};
  std::string text = {};
};

// Without a launcher the processes wait `patience` for each other before the meeting.
Outcome outcome_of(const Fault& fault, int at, const Seconds& patience) {
  const ScratchFolder folder;
  const auto file = folder / "fault";
  Words variables = {"LD_PRELOAD=" + from_environment("LOCKSTEP_FAULTY_CONNECT"), "FAULT_TO=" + fault.to,
                     "FAULT_AT=" + std::to_string(at), "FAULT_FILE=" + file.string(),
                     "FAULT_RANK=" + std::to_string(fault.rank)};
  if (!fault.milliseconds.empty()) variables.push_back("FAULT_MILLISECONDS=" + fault.milliseconds);
  RunningJob job(fault.processes, fault.launched, {ranks_program(), "connects", fault.devices}, folder.path(),
                 variables, std::to_string(patience.count()));
  Outcome outcome{.processes = job.finish()};
  const auto end = FileClock::now();
  outcome.leftovers = job.leftovers();
  outcome.connections = static_cast<int>(std::filesystem::file_size(file.string() + ".count"));
  if (std::ifstream(file) >> outcome.victim) outcome.after_fault = end - std::filesystem::last_write_time(file);
  outcome.text = std::to_string(fault.processes) + " processes of " + fault.devices + ", connection " +
                 std::to_string(at) + " to " + fault.to + ", process " + std::to_string(outcome.victim) + ", " +
                 std::to_string(outcome.after_fault / 1ms) + " ms:\n";
  for (const auto& process : outcome.processes) outcome.text += process.err;
  return outcome;
}

// A process learns its own address, and has three connections for the run. One that does not keep the store also asks
// whether the store answers.
size_t least_to_store(const Fault& fault) {
  return fault.launched || fault.rank != 0 ? 5 : 4;
}

// An undisturbed job shows how many there are. Without a launcher a process asks again until process 0 keeps a store,
// so that only the least number is sure.
int connections_of(const Fault& fault) {
  if (fault.to == "store" && !fault.launched) return static_cast<int>(least_to_store(fault));
  const Outcome undisturbed = outcome_of(fault, 0, kPatience);
  EXPECT_EQ(undisturbed.processes[0].code, 0) << undisturbed.text;
  return undisturbed.connections;
}

// At each connection, or each `step`th from the first on; some jobs side by side, since they mostly wait.
std::vector<Outcome> at_each_connection(const Fault& fault, int step = 1, const Seconds& patience = kPatience) {
  const int connections = connections_of(fault);
  std::vector<Outcome> outcomes((connections + step - 1) / step);
  side_by_side(static_cast<int>(outcomes.size()),
               [&](int i) { outcomes[i] = outcome_of(fault, 1 + i * step, patience); });
  for (const auto& outcome : outcomes) EXPECT_GE(outcome.victim, 0) << outcome.text;
  return outcomes;
}

class Connecting : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    if (!is_possible()) return;
    calibration_ = std::make_unique<Calibration>(Words{ranks_program(), "connects"}, 1000ms);
  }
  static void TearDownTestSuite() { calibration_.reset(); }
  void SetUp() override {
    if (!is_possible()) GTEST_SKIP() << "not with sanitizers";
  }
  static bool is_possible() { return std::getenv("LOCKSTEP_FAULTY_CONNECT") != nullptr; }

  static inline std::unique_ptr<Calibration> calibration_;
};

// Each two processes connect in the run, and in the group of the scenario.
size_t least_to_ranks(int processes) {
  return processes * (processes - 1);
}

TEST_F(Connecting, AProcessThatDiesIsNamedByTheOthersSoon) {
  Lateness lateness;
  for (const Fault& fault :
       {Fault{2, "cpu", "store"}, Fault{.processes = 2, .devices = "cpu", .to = "store", .rank = 0},
        Fault{3, "cpu", "store"}, Fault{.processes = 3, .devices = "cpu", .to = "store", .rank = 0},
        Fault{.processes = 3, .devices = "cpu", .to = "store", .rank = 2}, Fault{2, "cpu", "ranks"},
        Fault{3, "cpu", "ranks"}, Fault{2, "4xcpu", "ranks"}}) {
    const int step = fault.devices == "cpu" ? 1 : 4;
    const auto outcomes = at_each_connection(fault, step);
    EXPECT_GE(outcomes.size(), fault.to == "store" ? least_to_store(fault) : least_to_ranks(fault.processes))
        << fault.devices;
    for (const auto& outcome : outcomes) {
      const Finished& job = outcome.processes[0];
      EXPECT_EQ(job.code, 128 + SIGKILL) << outcome.text;
      for (int process = 0; process < fault.processes; ++process) {
        if (process == outcome.victim) continue;
        const std::string name = "process " + std::to_string(process) + ": ";
        EXPECT_THAT(job.err, AnyOf(HasSubstr(name + "the process of rank"),
                                   HasSubstr(name + "process " + std::to_string(outcome.victim) + " of " +
                                             std::to_string(fault.processes) +
                                             " did not come to run(): it was ended by signal 9")))
            << outcome.text;
      }
      EXPECT_THAT(job.err, Not(HasSubstr("ending the others")));
      lateness.count(outcome.after_fault, calibration_->soon());
      EXPECT_THAT(outcome.leftovers, IsEmpty()) << outcome.text;
    }
  }
  EXPECT_LE(lateness.late(), 2);
}

// Nobody sees the process end. One that dies before the meeting may as well never have been started.
TEST_F(Connecting, WithoutALauncherToo) {
  Lateness lateness;
  for (const Fault& fault :
       {Fault{2, "cpu", "ranks", false}, Fault{3, "cpu", "ranks", false}, Fault{2, "cpu", "store", false},
        Fault{2, "cpu", "store", false, {}, 0}, Fault{3, "cpu", "store", false}, Fault{3, "cpu", "store", false, {}, 0},
        Fault{3, "cpu", "store", false, {}, 2}}) {
    const bool before_the_meeting = fault.to == "store";
    const auto outcomes = at_each_connection(fault, /*step=*/1, before_the_meeting ? calibration_->soon() : kPatience);
    EXPECT_GE(outcomes.size(), before_the_meeting ? least_to_store(fault) : least_to_ranks(fault.processes));
    for (const auto& outcome : outcomes) {
      auto limit = calibration_->soon();
      for (int process = 0; process < fault.processes; ++process) {
        if (process == outcome.victim) continue;
        const Finished& other = outcome.processes[process];
        EXPECT_EQ(other.code, 3) << outcome.text;
        const std::string gone = "process " + std::to_string(process) + ": the process of rank " +
                                 std::to_string(outcome.victim) + " (cpu) is gone";
        if (!before_the_meeting || other.err.find(gone) != std::string::npos) {
          EXPECT_THAT(other.err, HasSubstr(gone)) << outcome.text;
          continue;
        }
        EXPECT_THAT(other.err, says_that_it_does_not_come(outcome.victim)) << outcome.text;
        limit += kSilentStore;
      }
      lateness.count(outcome.after_fault, limit);
      EXPECT_THAT(outcome.leftovers, IsEmpty()) << outcome.text;
    }
  }
  EXPECT_LE(lateness.late(), 2);
}

TEST_F(Connecting, AProcessThatIsSlowIsNotTakenForDead) {
  for (const char* to : {"store", "ranks"}) {
    const Fault fault{2, "cpu", to, true, "1500"};
    const auto outcomes = at_each_connection(fault);
    EXPECT_GE(outcomes.size(), to == std::string("store") ? least_to_store(fault) : least_to_ranks(2));
    for (const auto& outcome : outcomes) {
      EXPECT_EQ(outcome.processes[0].code, 0) << outcome.text;
    }
  }
}

TEST_F(Connecting, AMachineThatDoesNotReachItselfIsToldSoAtOnce) {
  const auto job = run_program({"launch", "-n", "2", "true"},
                               surroundings_with({"LD_PRELOAD=" + from_environment("LOCKSTEP_FAULTY_CONNECT"),
                                                  "FAULT_ERROR=" + std::to_string(ENETUNREACH)}));
  EXPECT_EQ(job.code, 1) << job.err;
  EXPECT_THAT(job.err, HasSubstr("this machine does not reach itself"));
}

}  // namespace connecting_test
