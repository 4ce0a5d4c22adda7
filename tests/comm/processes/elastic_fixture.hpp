// Elastic: what the tests of elastic jobs share. The processes leave their numbers, so that a test can kill one.
#pragma once

#include "cli/cli_fixture.hpp"
#include "running_job.hpp"

#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>
#include <string>

namespace lockstep {

// Until somebody asks it to end. A small network: a run in peace has to compute as many epochs.
inline const Words kEndless = {"--epochs", "100000", "--model", "mlp", "--width", "0.125"};

class Elastic : public Cli {
 protected:
  // Each process leaves its number, and the store's port.
  Words job_of(int processes, const Words& launch, const Words& program) const {
    const Words noting = {"/bin/sh", "-c",
                          "echo $$ $MASTER_PORT >\"$0/$LOCKSTEP_ELASTIC_MEMBER.new\"; "
                          "/bin/mv \"$0/$LOCKSTEP_ELASTIC_MEMBER.new\" \"$0/$LOCKSTEP_ELASTIC_MEMBER\"; exec \"$@\"",
                          notes_.path().string()};
    return Words{"launch", "-n", std::to_string(processes), "--elastic"} + launch + noting + program;
  }

  Words job(int processes, const Words& launch, const std::string& name, const Words& more) const {
    return job_of(processes, launch, Words{from_environment("LOCKSTEP_PROGRAM")} + settings(name, "cpu") + more);
  }

  // Gives surroundings of which leftovers() knows.
  Surroundings watched() const {
    return {.folder = work_.path(),
            .environment = Words{"PATH=" + notes_.path().string(), "LC_ALL=C.UTF-8"} + left_.variables()};
  }

  Words settings(const std::string& name, const std::string& devices) const {
    return train({"--name", name, "--devices", devices, "--grain", "8", "--momentum", "0.9", "--lr", "0.02"});
  }

  void kill_member(int member, int signal = SIGKILL) const {
    const pid_t pid = pid_in(notes_ / std::to_string(member));
    ASSERT_GT(pid, 0) << "process " << member << " has not been started";
    ASSERT_EQ(kill(pid, signal), 0) << "process " << member << " has ended";
  }

  // Gives what jobs in watched() have left. The kernel may still be ending a killed process.
  Words leftovers() const {
    std::set<std::string> ports;
    for (const auto& name : notes_.names()) {
      std::string pid, port;
      std::ifstream(notes_ / name) >> pid >> port;
      if (!port.empty()) ports.insert(port);
    }
    const auto look = [&] { return left_.found({}, {ports.begin(), ports.end()}); };
    comes_true([&] { return look().empty(); }, std::chrono::seconds(2));
    Words found = look();
    for (const auto& entry : std::filesystem::recursive_directory_iterator(work_.path())) {
      if (entry.path().extension() == ".tmp") found.push_back(entry.path());
    }
    return found;
  }

  // Expects the metrics of the undisturbed run.
  void expect_same_epochs(const std::string& run, size_t epochs) const {
    const auto actual = metrics(run), expected = metrics("undisturbed");
    ASSERT_EQ(actual.size(), epochs);
    for (size_t i = 0; i < epochs; ++i) {
      EXPECT_EQ(actual[i].train_loss, expected[i].train_loss) << run << ", epoch " << i + 1;
      EXPECT_EQ(actual[i].train_accuracy, expected[i].train_accuracy) << run << ", epoch " << i + 1;
      EXPECT_EQ(actual[i].test_accuracy, expected[i].test_accuracy) << run << ", epoch " << i + 1;
      EXPECT_EQ(actual[i].weights, expected[i].weights) << run << ", epoch " << i + 1;
    }
  }

  // The run was kEndless, and somebody has asked it to end.
  void expect_bits_of_peace(const std::string& run) const {
    const auto epochs = metrics(run).size();
    ASSERT_GT(epochs, 2u);
    const Words peace = settings("undisturbed", "cpu") + kEndless + Words{"--epochs", std::to_string(epochs)};
    ASSERT_EQ(run_program(peace, watched()).code, 0);
    expect_same_epochs(run, epochs);
  }

  ScratchFolder notes_;
  const Leftovers left_{};
};

}  // namespace lockstep
