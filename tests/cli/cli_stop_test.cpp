// Ctrl-C and SIGTERM: what is finished is kept, the exit code says why, a second one ends at once.
#include <cstdlib>
#include <thread>
#include <utility>

#include "cli_fixture.hpp"
#include "support/time_limits.hpp"

namespace cli_stop_test {

namespace fs = std::filesystem;
using lockstep::Cli;
using lockstep::Finished;
using lockstep::Program;
using testing::AllOf;
using testing::ContainsRegex;
using testing::HasSubstr;
using testing::Not;

class CliStop : public Cli {
 protected:
  std::vector<std::string> endless(const std::string& name) const {
    return train({"--epochs", "100000", "--name", name});
  }

  static constexpr std::chrono::seconds kLong{60};

  // Until the run has kept so many; false if a long time passes.
  bool wait_for_epochs(const std::string& name, size_t count) const {
    const std::string file = "runs/" + name + "/metrics.jsonl";
    const auto has_all = [&] {
      return fs::exists(work_ / file) && lockstep::lines_of(work_.read(file)).size() >= count;
    };
    return lockstep::comes_true(has_all, kLong);
  }

  bool wait_for_file(const std::string& name) const {
    return lockstep::comes_true([&] { return fs::exists(work_ / name); }, kLong);
  }

  static std::string lockstep_program() { return std::getenv("LOCKSTEP_PROGRAM"); }

  std::vector<std::string> slow_start() const { return {"train", "--data", "synthetic", "--name", "slow"}; }
};

TEST_F(CliStop, KeepsFinishedEpochs) {
  for (const auto& [signal, code] : {std::pair(SIGINT, 130), std::pair(SIGTERM, 143)}) {
    const std::string name = "run" + std::to_string(code);
    Program program(endless(name), surroundings());
    ASSERT_TRUE(program.wait_for("epoch      2/100000"));
    program.send(signal);
    const Finished run = program.finish();
    EXPECT_EQ(run.code, code) << run.err;
    const auto kept = metrics(name);
    EXPECT_GE(kept.size(), 2u);
    EXPECT_THAT(run.out, HasSubstr("\nstopped after " + std::to_string(kept.size()) +
                                   " of 100000 epochs; the run is kept in runs/" + name + "\n"));
    EXPECT_THAT(run.out, Not(HasSubstr("test acc: ")));
    for (const char* file : {"config.json", "model.safetensors", "notes.json", "report.html"}) {
      EXPECT_TRUE(fs::exists(work_ / "runs" / name / file)) << file;
    }
  }
}

TEST_F(CliStop, WorksFromTheKeyboard) {
  auto terminal = surroundings();
  terminal.terminal = true;
  terminal.environment.push_back("TERM=xterm");
  Program program(endless("typed"), terminal);
  ASSERT_TRUE(program.wait_for("epoch      2/100000"));
  program.type("\x03");
  const Finished run = program.finish();
  EXPECT_EQ(run.code, 130);
  EXPECT_THAT(run.out, ContainsRegex("stopped after [0-9]+ of 100000 epochs; the run is kept in runs/typed\r\n"
                                     "to go on: lockstep train --resume runs/typed\r\n$"));
}

TEST_F(CliStop, WorksWhileTheDataLoad) {
  auto terminal = surroundings();
  terminal.terminal = true;
  terminal.environment.push_back("TERM=xterm");
  Program program(slow_start(), terminal);
  ASSERT_TRUE(program.wait_for("loading the data"));
  program.type("\x03");
  const Finished run = program.finish();
  EXPECT_EQ(run.code, 130);
  EXPECT_THAT(run.out, AllOf(HasSubstr("stopped after 0 of 10 epochs; no run is kept"), Not(HasSubstr("epoch  1/10"))));
  EXPECT_FALSE(fs::exists(work_ / "runs"));
}

TEST_F(CliStop, WorksWhileOtherProcessesAreAwaited) {
  for (const char* rank : {"0", "1"}) {  // the first keeps the store, the second waits for it
    auto launched = surroundings();
    for (const std::string variable : {"SIZE=2", "LOCAL_SIZE=2"}) {
      launched.environment.push_back("OMPI_COMM_WORLD_" + variable);
    }
    for (const std::string variable : {"RANK=", "LOCAL_RANK="}) {
      launched.environment.push_back("OMPI_COMM_WORLD_" + variable + rank);
    }
    launched.environment.push_back("PMIX_NAMESPACE=stop-" + std::to_string(getpid()));
    Program program(train({"--devices", "cpu", "--name", "awaits"}), launched);
    ASSERT_TRUE(lockstep::wait_until_blocked(program.pid(), SIGTERM));
    std::this_thread::sleep_for(std::chrono::seconds(1));  // the program says nothing while it waits
    const auto start = std::chrono::steady_clock::now();
    program.send(SIGTERM);
    const Finished run = program.finish();
    EXPECT_EQ(run.code, 143) << run.err;
    EXPECT_LT(std::chrono::steady_clock::now() - start, lockstep::kSlowdown * std::chrono::seconds(10));
    EXPECT_FALSE(fs::exists(work_ / "runs"));
  }
}

TEST_F(CliStop, InTheFirstEpochKeepsACheckpoint) {
  auto terminal = surroundings();
  terminal.terminal = true;
  terminal.columns = 100;
  terminal.environment.push_back("TERM=xterm");
  Program program({"train", "--data", "synthetic", "--devices", "2xcpu", "--name", "early"}, terminal);
  ASSERT_TRUE(program.wait_for(", synthetic data]"));
  program.type("\x03");
  const Finished run = program.finish();
  EXPECT_EQ(run.code, 130);
  EXPECT_THAT(run.out, AllOf(HasSubstr("stopped after 0 of 10 epochs; the run is kept in runs/early"),
                             HasSubstr("to go on: lockstep train --resume runs/early")));
  ASSERT_EQ(std::distance(fs::directory_iterator(work_ / "runs/early/checkpoints"), {}), 1);
  const auto file = fs::directory_iterator(work_ / "runs/early/checkpoints")->path().filename().string();
  EXPECT_THAT(file, ContainsRegex("^epoch-0000-step-[0-9]+.safetensors$"));
}

TEST_F(CliStop, BeforeTheFirstEpochLeavesNoFolderIfNoCheckpointIsWanted) {
  auto terminal = surroundings();
  terminal.terminal = true;
  terminal.columns = 100;
  terminal.environment.push_back("TERM=xterm");
  for (const auto& name : {std::vector<std::string>{}, std::vector<std::string>{"--name", "early"}}) {
    std::vector<std::string> arguments = {"train", "--data", "synthetic", "--devices", "1", "--keep-last", "0"};
    arguments.insert(arguments.end(), name.begin(), name.end());
    Program program(arguments, terminal);
    ASSERT_TRUE(program.wait_for("epoch  1/10"));
    EXPECT_TRUE(fs::exists(work_ / "runs"));
    ASSERT_TRUE(program.wait_for(", synthetic data]"));  // the bar says so as well
    program.type("\x03");
    const Finished run = program.finish();
    EXPECT_EQ(run.code, 130);
    EXPECT_THAT(run.out, HasSubstr("stopped after 0 of 10 epochs; no run is kept (synthetic data)"));
    if (name.empty()) EXPECT_THAT(run.out, HasSubstr("_lenet_synthetic_cpu"));
    EXPECT_FALSE(fs::exists(work_ / "runs"));
  }
}

TEST_F(CliStop, ASecondSignalEndsAtOnce) {
  auto terminal = surroundings();
  terminal.terminal = true;
  terminal.environment.push_back("TERM=xterm");
  Program program(slow_start(), terminal);
  ASSERT_TRUE(program.wait_for("loading the data"));
  program.send(SIGINT);
  ASSERT_TRUE(program.wait_for("stopping"));
  program.send(SIGTERM);
  const Finished run = program.finish();
  EXPECT_EQ(run.code, 143);
  EXPECT_THAT(run.out, Not(HasSubstr("stopped after")));
}

TEST_F(CliStop, TheSameSignalTwiceAtOnceIsOneRequest) {
  Program program(endless("twice"), surroundings());
  ASSERT_TRUE(program.wait_for("epoch      1/100000"));
  program.send(SIGINT);
  program.send(SIGINT);
  ASSERT_TRUE(program.wait_for("stopping"));
  program.send(SIGINT);
  const Finished run = program.finish();
  EXPECT_EQ(run.code, 130);
  EXPECT_THAT(run.out, HasSubstr("stopped after"));
}

// `less` may read the first page only: the pipe is full before the first line. The lines of sixty epochs would fill it
// anew, and so does what `finish` reads.
TEST_F(CliStop, AReaderThatDoesNotReadHoldsUpNoTraining) {
  auto narrow = surroundings();
  narrow.pipe_bytes = 4096;
  narrow.full_output = 1;
  narrow.environment[0] = "PATH=/nowhere";  // no curves
  for (const bool reads_at_last : {true, false}) {
    const std::string name = reads_at_last ? "read" : "left";
    const size_t epochs = reads_at_last ? 60 : 5;
    Program program(train({"--model", "mlp", "--width", "0.0625", "--epochs", std::to_string(epochs), "--name", name}),
                    narrow);
    ASSERT_TRUE(wait_for_epochs(name, epochs));
    if (!reads_at_last) program.close_output();
    const Finished run = program.finish();
    EXPECT_EQ(metrics(name).size(), epochs);
    EXPECT_TRUE(fs::exists(work_ / "runs" / name / "model.safetensors"));
    EXPECT_EQ(run.code, reads_at_last ? 0 : 128 + SIGPIPE) << run.err;
    if (!reads_at_last) continue;
    EXPECT_GT(run.out.size(), 2u * 4096);
    for (size_t epoch = 1; epoch <= epochs; ++epoch) {  // nothing is lost
      EXPECT_THAT(run.out, ContainsRegex("\nepoch +" + std::to_string(epoch) + "/60 "));
    }
    EXPECT_THAT(run.out, HasSubstr("the run is kept in runs/read"));
  }
}

TEST_F(CliStop, WorksThoughNobodyReads) {
  const std::string lockstep = lockstep_program();
  const std::vector<std::string> both_in_one = {"-c", "exec \"$0\" \"$@\" 2>&1", lockstep},
                                 labelled = {"-c", "exec \"$0\" launch -n 2 --label \"$0\" \"$@\"", lockstep};
  for (const auto& [name, words] :
       {std::pair("alone", std::vector<std::string>()), std::pair("terminal", std::vector<std::string>()),
        std::pair("one", both_in_one), std::pair("job", labelled)}) {
    auto narrow = surroundings();
    narrow.terminal = name == std::string("terminal");
    narrow.pipe_bytes = 8192;
    narrow.full_output = 1;
    narrow.environment[0] = "PATH=/nowhere";
    if (!words.empty()) narrow.program = "/bin/sh";
    auto all = words;
    for (const auto& word : endless(name)) all.push_back(word);
    for (const char* const word : {"--model", "mlp", "--width", "0.0625"}) all.emplace_back(word);
    Program program(all, narrow);
    ASSERT_TRUE(wait_for_epochs(name, 3)) << name;
    if (narrow.terminal) {  // has room for a part of a line, sooner or later
      program.take(256);
      ASSERT_TRUE(wait_for_epochs(name, 40)) << name;
    }
    const auto start = std::chrono::steady_clock::now();
    program.send(SIGINT);
    EXPECT_TRUE(lockstep::wait_for_state(program.pid(), 'Z')) << name;  // ended, and not read
    EXPECT_LT(std::chrono::steady_clock::now() - start, lockstep::kSlowdown * std::chrono::seconds(10)) << name;
    const Finished run = program.finish();
    EXPECT_EQ(run.code, 130) << name << run.err;
    if (name == std::string("alone")) EXPECT_THAT(run.err, HasSubstr("to go on: lockstep train --resume runs/alone"));
    EXPECT_FALSE(fs::is_empty(work_ / "runs" / name / "checkpoints"));
  }
}

// The stop ends by an error: the run's folder has become a file. It comes in the middle of a long epoch, so there is
// something to write. The output's pipe was full before.
TEST_F(CliStop, WorksThoughNobodyReadsAndTheRunFails) {
  auto narrow = surroundings();
  narrow.full_output = 1;
  Program program({"train", "--data", "synthetic", "--model", "mlp", "--width", "0.0625", "--batch-size", "1",
                   "--devices", "2xcpu", "--checkpoint-every", "2000", "--name", "broken"},
                  narrow);
  ASSERT_TRUE(wait_for_file("runs/broken/checkpoints"));
  program.send(SIGSTOP);
  ASSERT_TRUE(lockstep::wait_for_state(program.pid(), 'T'));
  fs::remove_all(work_ / "runs/broken");
  work_.write("runs/broken", "a file");
  program.send(SIGINT);
  program.send(SIGCONT);
  EXPECT_TRUE(lockstep::wait_for_state(program.pid(), 'Z'));  // ended, and not read
  const Finished run = program.finish();
  EXPECT_EQ(run.code, 1) << run.err << " by signal " << run.signal;
  EXPECT_THAT(run.err, HasSubstr("lockstep: error: "));
}

// The warning holds up nothing and is not lost.
TEST_F(CliStop, AWarningThatNobodyReadsHoldsUpNoTraining) {
  auto narrow = surroundings();
  narrow.full_output = 2;
  auto words = endless("warned");  // there is no rank to check another's arithmetic
  words.insert(words.end(), {"--devices", "cpu", "--grain", "8", "--check-arithmetic", "0.1"});
  Program program(words, narrow);
  ASSERT_TRUE(wait_for_epochs("warned", 3));
  program.send(SIGINT);
  const Finished run = program.finish();
  EXPECT_EQ(run.code, 130);
  EXPECT_THAT(run.err, HasSubstr("lockstep: warning: ")) << run.out;
}

TEST_F(CliStop, AnIgnoredInterruptStaysIgnored) {
  auto background = surroundings();
  background.ignore_interrupt = true;
  Program program(endless("background"), background);
  ASSERT_TRUE(program.wait_for("epoch      1/100000"));
  program.send(SIGINT);
  ASSERT_TRUE(program.wait_for("epoch      4/100000"));
  program.send(SIGTERM);
  EXPECT_EQ(program.finish().code, 143);
}

}  // namespace cli_stop_test
