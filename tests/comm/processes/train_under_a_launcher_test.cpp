// Labels: processes program long thorough
// lockstep train under lockstep launch: the same run, printed and kept once; stopped, lost, frozen and gone on.
#include <lockstep/models/models.hpp>
#include <lockstep/plan/plan.hpp>

#include "cli/cli_fixture.hpp"
#include "running_job.hpp"

#include <algorithm>
#include <fstream>
#include <utility>

namespace train_under_a_launcher_test {

using namespace lockstep;
using testing::AllOf;
using testing::AnyOf;
using testing::ContainsRegex;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

class TrainUnderALauncher : public Cli {};

TEST_F(TrainUnderALauncher, IsTheSameRunPrintedAndKeptOnce) {
  const Words as_threads = train({"--name", "threads"});
  auto as_processes = train({"--name", "processes", "--devices", "cpu"});
  as_processes.insert(as_processes.begin(), {"launch", "-n", "2", from_environment("LOCKSTEP_PROGRAM")});
  const auto threads = run_program(as_threads, surroundings());
  const auto processes = run_program(as_processes, surroundings());
  ASSERT_EQ(threads.code, 0) << threads.err;
  ASSERT_EQ(processes.code, 0) << processes.err;
  EXPECT_EQ(processes.err, "");
  size_t epochs = 0;
  for (const auto& line : lines_of(processes.out)) epochs += line.starts_with("epoch ");
  EXPECT_EQ(epochs, 2u) << processes.out;
  const auto expected = metrics("threads"), actual = metrics("processes");
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    EXPECT_EQ(actual[i].train_loss, expected[i].train_loss);
    EXPECT_EQ(actual[i].train_accuracy, expected[i].train_accuracy);
    EXPECT_EQ(actual[i].test_accuracy, expected[i].test_accuracy);
  }
  EXPECT_EQ(difference(work_ / "runs/threads/model.safetensors", work_ / "runs/processes/model.safetensors"), 0);

  const Words eval = {"eval", "runs/threads"};
  const auto once = run_program(eval + Words{"--devices", "cpu"}, surroundings());
  const auto thrice =
      run_program(Words{"launch", "-n", "3", from_environment("LOCKSTEP_PROGRAM")} + eval + Words{"--devices", "cpu"},
                  surroundings());
  EXPECT_EQ(thrice.out, once.out);
}

TEST_F(TrainUnderALauncher, FollowsAPlan) {
  const ModelOptions model{.name = "mlp", .width = 0.25};
  const Plan plan{.model = "mlp",
                  .options = "width 0.25",
                  .layers = model_signature(make_model(model)),
                  .devices = "cpu,cpu",
                  .batch_size = 32,
                  .split = {.mesh = {.pipeline = 2}, .microbatches = 4, .cuts = {5}}};
  work_.write("plan.json", to_json(plan));
  const auto words = [&](const std::string& name, const std::string& file) {
    return Words{"train", "--model", "mlp", "--width", "0.25", "--lr", "0.05", "--epochs", "2", "--name", name} +
           Words{"--data-dir", images_.path().string(), "--batch-size", "32", "--plan", file};
  };
  const Words launch = {"launch", "-n", "2", from_environment("LOCKSTEP_PROGRAM")};
  const auto threads = run_program(words("threads", "plan.json"), surroundings());
  const auto processes = run_program(launch + words("processes", "plan.json"), surroundings());
  ASSERT_EQ(threads.code, 0) << threads.err;
  ASSERT_EQ(processes.code, 0) << processes.err;
  EXPECT_EQ(processes.err, "");
  EXPECT_THAT(processes.out, HasSubstr("1 x 2 x 1 (data x pipeline x tensor), 1f1b, 4 microbatches, cut at 5\n"));
  const auto expected = metrics("threads"), actual = metrics("processes");
  ASSERT_EQ(actual.size(), 2u);
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(actual[i].train_loss, expected[i].train_loss);
    EXPECT_EQ(actual[i].test_accuracy, expected[i].test_accuracy);
  }
  EXPECT_EQ(work_.read("runs/processes/model.safetensors"), work_.read("runs/threads/model.safetensors"));

  // Three ranks, which only the run itself can count.
  const auto more = run_program(Words{"launch", "-n", "3", from_environment("LOCKSTEP_PROGRAM")} +
                                    words("three", "plan.json") + Words{"--devices", "cpu"},
                                surroundings());
  EXPECT_EQ(more.code, 1);
  EXPECT_THAT(more.err, HasSubstr("1 x 2 x 1 (data x pipeline x tensor) does not fit 3 devices"));
  EXPECT_FALSE(std::filesystem::exists(work_ / "runs/three"));

  const auto made = run_program(launch + words("auto", "auto") + Words{"--devices", "cpu"}, surroundings());
  ASSERT_EQ(made.code, 0) << made.err;
  EXPECT_THAT(made.out, ContainsRegex("^plan: [0-9] x [0-9] x [0-9] .*\nlockstep "));
  EXPECT_EQ(metrics("auto").size(), 2u);
}

TEST_F(TrainUnderALauncher, EachProcessTracesItsOwnRanks) {
  auto words = train({"--name", "traced", "--devices", "cpu", "--trace", "trace.json"});
  words.insert(words.begin(), {"launch", "-n", "2", from_environment("LOCKSTEP_PROGRAM")});
  const auto job = run_program(words, surroundings());
  ASSERT_EQ(job.code, 0) << job.err;
  EXPECT_THAT(job.out, HasSubstr("the trace is in trace.json, of each other process in a file with its number; "));
  const auto text_of = [&](const char* name) {
    std::ostringstream text;
    text << std::ifstream(work_ / name).rdbuf();
    return text.str();
  };
  const auto first = text_of("trace.json"), second = text_of("trace.1.json");
  EXPECT_THAT(first, AllOf(HasSubstr("rank 0 (cpu)"), Not(HasSubstr("rank 1 (cpu)")), HasSubstr("lockstep::bucket")));
  EXPECT_THAT(second, AllOf(HasSubstr("rank 1 (cpu)"), Not(HasSubstr("rank 0 (cpu)")), HasSubstr("lockstep::bucket")));
}

TEST_F(TrainUnderALauncher, ANameThatIsTakenIsRefused) {
  ASSERT_EQ(run_program(train({"--name", "taken", "--epochs", "1"}), surroundings()).code, 0);
  auto words = train({"--name", "taken", "--devices", "cpu"});
  words.insert(words.begin(), {"launch", "-n", "2", from_environment("LOCKSTEP_PROGRAM")});
  const auto job = run_program(words, surroundings());
  EXPECT_EQ(job.code, 1);
  EXPECT_THAT(job.err,
              AllOf(HasSubstr("lockstep: error: runs/taken already holds a run's "), Not(HasSubstr("Exception raised")),
                    ContainsRegex("lockstep launch: [^\n]*rank [01] ended with exit code 1[^\n]*\n$")));
  EXPECT_EQ(metrics("taken").size(), 1u);
}

TEST_F(TrainUnderALauncher, WhatWouldFailInTheSameWayDoesNotStartAgain) {
  const Words launch = {"launch", "-n", "2", "--max-restarts", "3", from_environment("LOCKSTEP_PROGRAM")};
  std::vector<Finished> jobs(2);
  side_by_side(2, [&](int code_3) {
    const Words wrong = code_3 == 1 ? Words{"--lr", "1e30", "--name", "wild"} : Words{"--epochs", "0"};
    jobs[code_3] = run_program(launch + train(wrong + Words{"--devices", "cpu"}), surroundings());
  });
  for (const int code : {2, 3}) {
    const Finished& job = jobs[code - 2];
    EXPECT_EQ(job.code, code) << job.err;
    EXPECT_THAT(job.err,
                AllOf(HasSubstr("lockstep launch: it does not start again, since it would fail in the same way\n"),
                      Not(HasSubstr("restart "))));
  }
}

TEST_F(TrainUnderALauncher, ASecondErrorOfAnotherKindIsSaidToo) {
  const Words words = with_rank_1_doing("set -- \"$@\" --lr 9e99", {from_environment("LOCKSTEP_PROGRAM")}) +
                      train({"--epochs", "0", "--devices", "cpu"});
  EXPECT_THAT(run_program(words, surroundings()).err,
              AllOf(HasSubstr("lockstep: --epochs: 0"), HasSubstr("lockstep: --lr: 9e99")));
}

TEST_F(TrainUnderALauncher, StopsAtOnceWhileItWaitsForAnother) {
  const Words words = with_rank_1_doing("exec sleep 100", {from_environment("LOCKSTEP_PROGRAM")}) +
                      train({"--name", "early", "--devices", "cpu"});
  for (const int signal : {SIGINT, SIGTERM}) {
    const auto start = std::chrono::steady_clock::now();
    Program program(words, surroundings());
    ASSERT_TRUE(program.wait_for("run folder"));
    program.send(signal);
    const auto job = program.finish();
    EXPECT_EQ(job.code, 128 + signal) << job.err;
    EXPECT_THAT(job.out, HasSubstr("stopped after 0 of 2 epochs; no run is kept"));
    // Nothing else: if the news that rank 1 was stopped overtakes the signal, rank 0 ends without having said
    // "stopping".
    EXPECT_THAT(job.err,
                AnyOf(IsEmpty(), AllOf(HasSubstr("stopping"), Not(HasSubstr("error")), Not(HasSubstr("ended")))));
    EXPECT_FALSE(std::filesystem::exists(work_ / "runs"));
    EXPECT_LT(std::chrono::steady_clock::now() - start, kBeforeTimeouts);
  }
}

TEST_F(TrainUnderALauncher, SaysAtWhichStepAProcessWasLost) {
  const Words words = Words{"launch", "-n",
                            "2",      "sh",
                            "-c",     "echo $$ > pid-of-$RANK; exec \"$@\"",
                            "sh",     from_environment("LOCKSTEP_PROGRAM")} +
                      train({"--name", "lost", "--devices", "cpu", "--epochs", "100000"});
  Program program(words, surroundings());
  ASSERT_TRUE(program.wait_for("epoch      1/100000"));
  pid_t victim = 0;
  std::ifstream(work_ / "pid-of-1") >> victim;
  ASSERT_GT(victim, 0);
  kill(victim, SIGKILL);
  const auto job = program.finish();
  EXPECT_EQ(job.code, 128 + SIGKILL);
  EXPECT_THAT(job.err, AllOf(HasSubstr("the process of rank 1 (cpu) is gone: it was ended by signal 9 (Killed). rank 0 "
                                       "(cpu) was in "),
                             ContainsRegex("; the last complete step was step [1-9]")));
}

TEST_F(TrainUnderALauncher, OtherFlagsInOneProcessAreRefusedWithBothShown) {
  const Words words =
      Words{"launch", "-n", "2", "sh", "-c", "exec \"$0\" \"$@\" --seed 4$RANK", from_environment("LOCKSTEP_PROGRAM")} +
      train({"--name", "differ", "--devices", "cpu"});
  const auto job = run_program(words, surroundings());
  EXPECT_EQ(job.code, 1);
  EXPECT_THAT(job.err, AllOf(HasSubstr("process 1 runs another program or configuration than process 0"),
                             HasSubstr("process 0: seed 41; process 0: seed 40. All"), Not(HasSubstr("batch_size"))));
  EXPECT_FALSE(std::filesystem::exists(work_ / "runs"));
}

TEST_F(TrainUnderALauncher, TheTimeoutIsTheRunsAndNotKept) {
  const Words program = {"sh", "-c", "exec \"$0\" \"$@\" --timeout 4$RANK", from_environment("LOCKSTEP_PROGRAM")};
  const auto job = run_program(Words{"launch", "-n", "2"} + program + train({"--name", "differ", "--devices", "cpu"}),
                               surroundings());
  EXPECT_THAT(job.err, HasSubstr("than process 0: timeout 41 s; process 0: timeout 40 s. All"));
  ASSERT_EQ(run_program(train({"--name", "kept", "--epochs", "1", "--timeout", "41"}), surroundings()).code, 0);
  EXPECT_THAT(work_.read("runs/kept/config.json"), Not(HasSubstr("timeout")));
}

TEST_F(TrainUnderALauncher, TheLossOfTheLauncherIsSaidWithoutCallStacks) {
  // In a session of their own, and not the launcher's children, the ranks learn the loss from the store alone.
  const Words in_a_session = {"launch", "-n", "2", "sh", "-c", "setsid \"$0\" \"$@\"; true"};
  const Words lockstep =
      Words{from_environment("LOCKSTEP_PROGRAM")} + train({"--name", "a", "--devices", "cpu", "--epochs", "300"});
  for (const auto& [program, runs] : {std::pair(lockstep, "epoch   2/300"),
                                      std::pair(Words{ranks_program(), "lives", "cpu", "for_ever"}, "connected")}) {
    Program job(in_a_session + program, surroundings());
    ASSERT_TRUE(job.wait_for(runs));
    job.send(SIGKILL);
    EXPECT_THAT(job.finish().err, AllOf(HasSubstr("the launcher is gone"), Not(HasSubstr("Exception raised from")),
                                        Not(HasSubstr("frame #")), Not(HasSubstr("[W"))));
  }
}

// It computes for 5 ms of every 100. The network is one that computes for longer than its ranks exchange.
TEST_F(TrainUnderALauncher, OneThatIsTwentyTimesSlowerChangesNoBitAndIsNamed) {
  const Words program = {from_environment("LOCKSTEP_PROGRAM")},
              more = {"--devices", "cpu", "--epochs", "1", "--model", "resnet18", "--width", "0.4"};
  const Words peace = Words{"launch", "-n", "2"} + program + train(Words{"--name", "undisturbed"} + more);
  ASSERT_EQ(run_program(peace, surroundings()).code, 0);
  RunningJob job(2, /*launched=*/true, program + train(Words{"--name", "slow"} + more), work_.path());
  job.wait_for_processes();
  ASSERT_TRUE(job.wait_for("run folder"));
  while (job.send(1, SIGSTOP)) {
    std::this_thread::sleep_for(std::chrono::milliseconds(95));
    job.send(1, SIGCONT);
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  const auto ended = job.finish();
  EXPECT_EQ(ended[0].code, 0) << ended[0].err;
  EXPECT_EQ(ended[0].err, "");
  EXPECT_THAT(ended[0].out, HasSubstr("rank 1 (cpu) is slow: it computed for "));
  EXPECT_EQ(work_.read("runs/slow/model.safetensors"), work_.read("runs/undisturbed/model.safetensors"));
}

// The best of three: a machine may be busy.
TEST_F(TrainUnderALauncher, AProcessThatIsSilentForTooLongIsDead) {
  auto best = RunningJob::Clock::duration::max();
  for (int i = 0; i < 3 && best >= std::chrono::seconds(5); ++i) {
    RunningJob job(2, /*launched=*/true,
                   Words{from_environment("LOCKSTEP_PROGRAM")} + train({"--name", "a" + std::to_string(i), "--devices",
                                                                        "cpu", "--epochs", "300", "--silence", "2"}),
                   work_.path());
    job.wait_for_processes();
    ASSERT_TRUE(job.wait_for("epoch   2/300"));
    const auto start = RunningJob::Clock::now();
    job.send(1, SIGSTOP);
    EXPECT_TRUE(job.wait_for("the process of rank 1 (cpu) is gone"));
    best = std::min(best, RunningJob::Clock::now() - start);
    job.send(1, SIGKILL);
    job.finish();
  }
  EXPECT_LT(best, std::chrono::seconds(5));  // six by default
}

TEST_F(TrainUnderALauncher, OtherDataOfTheSameSizeInOneProcessAreRefused) {
  const ScratchFolder other;
  write_small_images(other, 300, 100);
  std::string labels = other.read("train-labels-idx1-ubyte");
  labels.back() = static_cast<char>(9 - labels.back());
  other.write("train-labels-idx1-ubyte", labels);
  const auto arguments = train({"--name", "differ", "--devices", "cpu"});
  const Words words =
      Words{"launch",
            "-n",
            "2",
            "sh",
            "-c",
            "[ $RANK = 0 ] || set -- \"$@\" --data-dir " + other.path().string() + "; exec \"$0\" \"$@\"",
            from_environment("LOCKSTEP_PROGRAM")} +
      arguments;
  const auto job = run_program(words, surroundings());
  EXPECT_EQ(job.code, 1);
  EXPECT_THAT(job.err, AllOf(HasSubstr("process 1 runs another program or configuration than process 0: training "
                                       "targets of SHA-256 "),
                             HasSubstr("; process 0: training targets of SHA-256 "), HasSubstr("on the same data"),
                             Not(HasSubstr("samples of SHA-256"))));
  EXPECT_FALSE(std::filesystem::exists(work_ / "runs"));
}

// The first start's rank 1 is killed as soon as there is a checkpoint.
class TrainThatStartsAgain : public Cli {
 protected:
  // `number`: a shell's words that give "1.0" for that rank of that start.
  Words dying(const std::string& number) const {
    return {"sh", "-c",
            "test " + number +
                " != 1.0 || (until test -e runs/killed/checkpoints/epoch-0001*; do sleep 0.02; done; kill -9 $$) & "
                "exec \"$0\" \"$@\"",
            from_environment("LOCKSTEP_PROGRAM")};
  }

  Words settings(const std::string& name, const Words& more) const {
    return train(Words{"--name", name, "--devices", "cpu", "--model", "mlp", "--width", "0.125", "--epochs", "20",
                       "--batch-size", "100", "--keep-last", "20", "--resume", "auto"} +
                 more);
  }

  void expect_goes_on(const Finished& job, const Words& more) const {
    EXPECT_EQ(job.code, 0) << job.err;
    EXPECT_THAT(job.out, HasSubstr("goes on from      runs/killed/checkpoints/epoch-"));
    const Words launch = {"launch", "-n", "2", from_environment("LOCKSTEP_PROGRAM")};
    ASSERT_EQ(run_program(launch + settings("undisturbed", more), surroundings()).code, 0);
    EXPECT_EQ(difference(work_ / "runs/killed/model.safetensors", work_ / "runs/undisturbed/model.safetensors"), 0);
  }
};

TEST_F(TrainThatStartsAgain, GoesOnFromItsLastCheckpoint) {
  // The guide has the second one.
  for (const Words& more : {Words{}, Words{"--grain", "8", "--optimizer", "adam", "--lr", "0.001", "--zero-stage", "1",
                                           "--checkpoint-every", "3"}}) {
    const auto job = run_program(Words{"launch", "-n", "2", "--max-restarts", "1"} +
                                     dying("$RANK.$TORCHELASTIC_RESTART_COUNT") + settings("killed", more),
                                 surroundings());
    EXPECT_THAT(job.err, HasSubstr("lockstep launch: all processes start again, restart 1 of 1\n"));
    expect_goes_on(job, more);
    std::filesystem::remove_all(work_ / "runs");
  }
}

// The loop of a batch script. There is no srun here: this one starts two processes of a step, and ends the other if one
// fails.
TEST_F(TrainThatStartsAgain, GoesOnInALoopAroundSrun) {
  const std::string loop =
      "srun() {\n"
      "  export SLURM_STEP_NUM_TASKS=2 SLURM_STEP_TASKS_PER_NODE=2 SLURM_NODEID=0 SLURM_JOB_ID=$$ SLURM_STEP_ID=$try\n"
      "  SLURM_PROCID=0 SLURM_LOCALID=0 \"$@\" &\n"
      "  first=$!\n"
      "  SLURM_PROCID=1 SLURM_LOCALID=1 \"$@\" || { kill $first; wait $first; return 1; }\n"
      "  wait $first\n"
      "}\n"
      "for try in 0 1 2; do\n"
      "  srun \"$0\" \"$@\" && exit\n"
      "  echo again\n"
      "done\n"
      "exit 1\n";
  auto slurm = surroundings();
  slurm.program = "/bin/sh";
  slurm.environment.insert(slurm.environment.end(), {"MASTER_ADDR=127.0.0.1", "MASTER_PORT=" + free_port()});
  const auto job = run_program(
      Words{"-c", loop} + dying("$SLURM_PROCID.$SLURM_STEP_ID") + settings("killed", {"--grain", "8"}), slurm);
  EXPECT_THAT(job.out, HasSubstr("again\n"));
  expect_goes_on(job, {"--grain", "8"});
}

TEST_F(TrainUnderALauncher, StandsStillAndGoesOnToTheSameBits) {
  const Words more = {"--devices", "cpu", "--epochs", "8"};
  const Words launch = {"launch", "-n", "2", from_environment("LOCKSTEP_PROGRAM")};
  ASSERT_EQ(run_program(launch + train(Words{"--name", "undisturbed"} + more), surroundings()).code, 0);
  Program program(launch + train(Words{"--name", "stood"} + more), surroundings());
  ASSERT_TRUE(program.wait_for("epoch 2/8"));
  program.send(SIGTSTP);
  ASSERT_TRUE(wait_for_state(program.pid(), 'T'));
  std::this_thread::sleep_for(std::chrono::seconds(2));  // more than a rank waits before it looks after the others
  program.send(SIGCONT);
  const auto job = program.finish();
  EXPECT_EQ(job.code, 0) << job.err;
  EXPECT_EQ(job.err, "");
  EXPECT_EQ(work_.read("runs/stood/model.safetensors"), work_.read("runs/undisturbed/model.safetensors"));
}

// Shorter than the silence at which a process is taken for dead.
TEST_F(TrainUnderALauncher, OneThatStandsStillForAWhileChangesNoBit) {
  const Words program = {from_environment("LOCKSTEP_PROGRAM")},
              more = {"--devices", "cpu", "--epochs", "30", "--silence", "6"};
  ASSERT_EQ(
      run_program(Words{"launch", "-n", "2"} + program + train(Words{"--name", "undisturbed"} + more), surroundings())
          .code,
      0);
  side_by_side(2, [&](int rank) {
    const std::string name = "stood" + std::to_string(rank);
    RunningJob job(2, /*launched=*/true, program + train(Words{"--name", name} + more), work_.path());
    job.wait_for_processes();
    ASSERT_TRUE(job.wait_for("epoch  2/30"));
    ASSERT_TRUE(job.send(rank, SIGSTOP));
    std::this_thread::sleep_for(std::chrono::seconds(3));  // more than a rank waits before it looks after the others
    ASSERT_TRUE(job.send(rank, SIGCONT));
    const auto ended = job.finish();
    EXPECT_EQ(ended[0].code, 0) << ended[0].err;
    EXPECT_EQ(ended[0].err, "");
    EXPECT_EQ(work_.read("runs/" + name + "/model.safetensors"), work_.read("runs/undisturbed/model.safetensors"));
  });
}

TEST_F(TrainUnderALauncher, StopsWhenAsked) {
  auto words = train({"--name", "stopped", "--devices", "cpu", "--epochs", "100000"});
  words.insert(words.begin(), {"launch", "-n", "2", from_environment("LOCKSTEP_PROGRAM")});
  Program program(words, surroundings());
  ASSERT_TRUE(program.wait_for("epoch      2/100000"));
  program.send(SIGINT);
  const auto job = program.finish();
  EXPECT_EQ(job.code, 130) << job.err;
  EXPECT_THAT(job.out, HasSubstr("of 100000 epochs; the run is kept in runs/stopped"));
  EXPECT_THAT(job.err, Not(HasSubstr("error")));
  EXPECT_GE(metrics("stopped").size(), 2u);
}

TEST_F(TrainUnderALauncher, ARequestToOneOfItsProcessesStopsAllAndIsNoFailure) {
  for (const char* rank : {"0", "1"}) {
    const Words program = {"sh", "-c", "echo $$ >$RANK; exec \"$0\" \"$@\"", from_environment("LOCKSTEP_PROGRAM")};
    Program job(Words{"launch", "-n", "2", "--max-restarts", "1"} + program +
                    train({"--name", rank, "--devices", "cpu", "--epochs", "100000"}),
                surroundings());
    ASSERT_TRUE(job.wait_for("epoch      2/100000"));
    kill(pid_in(work_ / rank), SIGTERM);
    const auto ended = job.finish();
    EXPECT_EQ(ended.code, 128 + SIGTERM) << ended.err;
    EXPECT_THAT(ended.err,
                ContainsRegex("lockstep launch: rank [01] stopped on request .exit code 143. after [0-9.]+ s\n$"));
    EXPECT_THAT(ended.out, HasSubstr("to go on: "));
  }
}

}  // namespace train_under_a_launcher_test
