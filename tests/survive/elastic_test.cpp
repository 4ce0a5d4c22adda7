// Labels: processes program long repeated
// lockstep train under lockstep launch --elastic: killed processes change neither the weights nor the metrics.
#include <lockstep/models/models.hpp>

#include "comm/processes/elastic_fixture.hpp"
#include "comm/processes/memory_group.hpp"
#include "trainer/checkpoint_folder.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <utility>

namespace elastic_test {

using namespace lockstep;
using testing::AllOf;
using testing::AnyOf;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

TEST_F(Elastic, KillsChangeNoBit) {
  Program killed(job(3, {}, "killed", {"--epochs", "40"}), watched());
  ASSERT_TRUE(killed.wait_for("epoch  2/40"));
  kill_member(0);  // who keeps the run
  ASSERT_TRUE(killed.wait_for("process 3 has joined"));
  kill_member(2);
  kill_member(1);  // the successor alone is left
  ASSERT_TRUE(killed.wait_for("process 4 has joined"));
  kill_member(3);  // a successor, who keeps the run by now
  const auto ended = killed.finish();
  ASSERT_EQ(ended.code, 0) << ended.err << ended.out;
  EXPECT_THAT(ended.err, AllOf(HasSubstr("process 0 was ended by signal 9"), HasSubstr("the others go on without it"),
                               HasSubstr("process 3 starts in the place of rank 0"), Not(HasSubstr("error:"))));
  EXPECT_THAT(ended.out, HasSubstr("the run is kept in runs/killed"));

  // The others take a process that stands still for gone after its silence, and the launcher ends the process.
  Program stopped(job(2, {}, "stopped", {"--epochs", "60", "--check-arithmetic", "0.2"}), watched());
  ASSERT_TRUE(stopped.wait_for("epoch  2/60"));
  kill_member(0, SIGSTOP);
  ASSERT_TRUE(stopped.wait_for("process 2 has joined"));
  EXPECT_EQ(state_of(pid_in(notes_ / "0")), 'Z');  // so it does not wake
  const auto after_stop = stopped.finish();
  ASSERT_EQ(after_stop.code, 0) << after_stop.err << after_stop.out;
  EXPECT_THAT(after_stop.err, HasSubstr("process 0 stands still, and is killed"));
  EXPECT_THAT(leftovers(), IsEmpty());

  ASSERT_EQ(run_program(settings("undisturbed", "cpu") + Words{"--epochs", "60"}, watched()).code, 0);
  expect_same_epochs("killed", 40);
  expect_same_epochs("stopped", 60);
}

TEST_F(Elastic, WithoutItsLauncherAllEndAndSaySo) {
  const auto all_say_so = [] {
    const auto says_so = [](int member) {
      return HasSubstr("process " + std::to_string(member) +
                       " of an elastic job: the launcher is gone: the store that it keeps does not answer");
    };
    return AllOf(says_so(0), says_so(1), says_so(2));
  };
  const Words lockstep = {from_environment("LOCKSTEP_PROGRAM")};
  // Processes in a session of their own are not the launcher's children: the store alone tells them of the loss.
  const Words in_a_session = Words{"/bin/sh", "-c", "/usr/bin/setsid \"$0\" \"$@\"; true"} + lockstep;
  for (const auto& [name, program] : {std::pair("orphans", lockstep), std::pair("others", in_a_session)}) {
    Program job(job_of(3, {}, program + settings(name, "cpu") + Words{"--epochs", "100000"}), watched());
    ASSERT_TRUE(job.wait_for("epoch      2/100000"));
    job.send(SIGKILL);
    const auto start = std::chrono::steady_clock::now();
    const auto ended = job.finish();  // it reads until nobody has the outputs open
    EXPECT_LT(std::chrono::steady_clock::now() - start, kBeforeTimeouts);
    if (program == lockstep) {
      // All get SIGTERM from the system, too. Mostly they notice the loss before agreeing to stop.
      EXPECT_THAT(ended.err + ended.out,
                  AnyOf(all_say_so(), HasSubstr("of 100000 epochs; the run is kept in runs/orphans")));
    } else {
      EXPECT_THAT(ended.err, all_say_so());
    }
    EXPECT_FALSE(std::filesystem::is_empty(work_ / "runs" / name / "checkpoints"));
    EXPECT_THAT(leftovers(), IsEmpty());
  }
}

// A network, an optimizer and groups of parameters of its own.
TEST_F(Elastic, KillsChangeNoBitOfAFit) {
  Program killed(job_of(2, {}, {ranks_program(), "fits", "cpu", "runs/killed"}), watched());
  ASSERT_TRUE(killed.wait_for("epoch 3 done"));
  kill_member(0);  // who keeps the run
  ASSERT_TRUE(killed.wait_for("process 2 has joined"));
  kill_member(1);
  const auto ended = killed.finish();
  ASSERT_EQ(ended.code, 0) << ended.err << ended.out;
  EXPECT_THAT(ended.err, AllOf(HasSubstr("process 1 was ended by signal 9"), Not(HasSubstr("error:"))));

  auto undisturbed = watched();
  undisturbed.program = ranks_program();
  const auto alone = run_program({"fits", "cpu", "runs/undisturbed"}, undisturbed);
  ASSERT_EQ(alone.code, 0) << alone.err;
  EXPECT_EQ(metrics("undisturbed").size(), 60u);
  expect_same_epochs("killed", 60);
}

TEST_F(Elastic, KillsChangeNoBitOfALoopOfOnesOwn) {
  Program killed(job_of(2, {}, {ranks_program(), "own_loop", "cpu", "killed.safetensors"}), watched());
  ASSERT_TRUE(killed.wait_for("step 3 of 2 ranks"));
  kill_member(0);
  ASSERT_TRUE(killed.wait_for("of 1 ranks"));
  ASSERT_TRUE(killed.wait_for("process 2 has joined"));
  kill_member(1);
  ASSERT_TRUE(killed.wait_for("process 3 has joined"));
  const auto ended = killed.finish();
  ASSERT_EQ(ended.code, 0) << ended.err << ended.out;
  EXPECT_THAT(ended.out, HasSubstr("step 80 of 2 ranks"));

  auto alone = watched();
  alone.program = ranks_program();
  ASSERT_EQ(run_program({"own_loop", "cpu", "alone alone.safetensors"}, alone).code, 0);
  const auto expected = work_.read("alone.safetensors");
  EXPECT_FALSE(expected.empty());
  EXPECT_EQ(work_.read("killed.safetensors"), expected);

  const auto without_grain = run_program(job_of(1, {}, {ranks_program(), "own_loop", "cpu", "no grain"}), watched());
  EXPECT_THAT(without_grain.err, HasSubstr("this run is elastic, and the batch has no grain"));
  EXPECT_THAT(ended.err, Not(HasSubstr("has no grain")));

  const auto sliced = run_program(job_of(1, {}, {ranks_program(), "own_loop", "cpu", "sliced"}), watched());
  EXPECT_NE(sliced.code, 0);
  EXPECT_THAT(sliced.err, AllOf(HasSubstr("in an elastic run a slice of the optimizer is lost"),
                                HasSubstr("start all processes again when one is lost (`max_restarts`)")));
}

// Flips a bit of all copies of `bytes` in a process's memory, and returns how many there were.
int flip_in_memory(pid_t pid, const std::string& bytes) {
  const std::string process = "/proc/" + std::to_string(pid);
  const int memory = open((process + "/mem").c_str(), O_RDWR | O_CLOEXEC);
  if (memory < 0) return -1;
  int copies = 0;
  std::ifstream maps(process + "/maps");
  for (std::string line; std::getline(maps, line);) {
    unsigned long begin = 0, end = 0;
    char access[5] = {};
    if (std::sscanf(line.c_str(), "%lx-%lx %4s", &begin, &end, access) != 3 || access[1] != 'w') continue;
    std::string area(end - begin, '\0');
    if (pread(memory, area.data(), area.size(), static_cast<off_t>(begin)) != static_cast<ssize_t>(area.size()))
      continue;
    for (size_t at = area.find(bytes); at != area.npos; at = area.find(bytes, at + 1)) {
      const char flipped = static_cast<char>(bytes[2] ^ 0x10);
      copies += pwrite(memory, &flipped, 1, static_cast<off_t>(begin + at + 2)) == 1 ? 1 : 0;
    }
  }
  close(memory);
  return copies;
}

// This learning rate is 0 as a float, so the weights stay what they were at first, and the bytes can be found.
TEST_F(Elastic, AFlippedBitIsFoundAndMended) {
  Program flipped(job(3, {}, "flipped", {"--epochs", "20", "--check-replicas", "1", "--lr", "1e-300"}), watched());
  ASSERT_TRUE(flipped.wait_for("epoch  1/20"));
  const auto weights = make_model({}, /*seed=*/1)->parameters()[0].contiguous();
  const std::string bytes(static_cast<const char*>(weights.const_data_ptr()), weights.nbytes());
  EXPECT_GT(flip_in_memory(pid_in(notes_ / "0"), bytes), 0);  // a new generation would begin with rank 0's weights
  const auto ended = flipped.finish();
  ASSERT_EQ(ended.code, 0) << ended.err << ended.out;
  EXPECT_THAT(ended.err, AllOf(HasSubstr("no longer equal: rank 0 (cpu) from the others in "),
                               HasSubstr("The others go on, and give it their state"), Not(HasSubstr("error:"))));
  const auto epochs = metrics("flipped");
  EXPECT_EQ(epochs.size(), 20u);
  for (const auto& epoch : epochs) EXPECT_EQ(epoch.weights, epochs[0].weights) << epoch.epoch;
}

// The second process stands still before it has begun.
TEST_F(Elastic, OneThatNeverBeginsCountsAsDead) {
  const Words standing = {"/bin/sh", "-c", "test $LOCKSTEP_ELASTIC_MEMBER != 1 || kill -STOP $$; exec \"$@\"", "sh",
                          from_environment("LOCKSTEP_PROGRAM")};
  auto surroundings = watched();
  surroundings.environment.push_back("LOCKSTEP_RENDEZVOUS_TIMEOUT=4");
  const auto job = run_program(
      Words{"launch", "-n", "2", "--elastic"} + standing + settings("begins", "cpu") + Words{"--epochs", "3"},
      surroundings);
  EXPECT_EQ(job.code, 0) << job.err << job.out;
  EXPECT_THAT(job.err, HasSubstr("process 1 has not begun to train within 4 s"));
  EXPECT_EQ(metrics("begins").size(), 3u);
}

// The second process and its successor need more memory than there is. The first process goes on alone.
TEST_F(Elastic, OfProcessesThatTheKernelKillsForWantOfMemoryTheFirstAloneHasASuccessor) {
  const MemoryGroup group(1 << 30);
  if (!group.is_there()) GTEST_SKIP() << "this system lets the test make no control group";
  const Words needing = {"/bin/sh", "-c",
                         "test $LOCKSTEP_ELASTIC_MEMBER = 0 || exec /usr/bin/tail /dev/zero; exec \"$@\"", "sh",
                         from_environment("LOCKSTEP_PROGRAM")};
  Program job(group.lockstep(Words{"launch", "-n", "2", "--elastic"} + needing + settings("memory", "cpu") +
                             Words{"--epochs", "1000"}),
              group.with(watched()));
  EXPECT_TRUE(job.wait_for("process 2 gets no successor, which would need as much memory"));
  job.send(SIGTERM);
  const auto ended = job.finish();
  EXPECT_EQ(ended.code, 143) << ended.err;
  EXPECT_THAT(ended.err, AllOf(HasSubstr("process 2 starts in the place of rank 1"), Not(HasSubstr("process 3"))));
}

TEST_F(Elastic, WhenAllWithTheStateAreKilledItSaysSoAndNamesTheNewestCheckpoint) {
  Program job(this->job(2, {}, "gone", {"--epochs", "100000"}), watched());
  ASSERT_TRUE(job.wait_for("epoch      2/100000"));
  kill_member(0);
  ASSERT_TRUE(job.wait_for("process 2 starts in the place of rank 0"));
  kill_member(1);  // before its successor has joined
  const auto ended = job.finish();
  EXPECT_EQ(ended.code, 137) << ended.err;
  const auto newest = newest_checkpoint(work_ / "runs/gone/checkpoints").string();
  EXPECT_THAT(newest, HasSubstr("epoch-"));
  EXPECT_THAT(ended.err,
              AllOf(HasSubstr("all processes that had the state of the training are gone, so nobody could go on"),
                    HasSubstr("with --resume auto (keep.resume in a fit()): it goes on from its newest checkpoint, " +
                              newest)));
}

TEST_F(Elastic, KilledBeforeTheyBeginTheyAreNotCalledAnotherProgram) {
  const Words killed = {"/bin/sh", "-c", "kill -9 $$", from_environment("LOCKSTEP_PROGRAM")};
  const auto ended =
      run_program(Words{"launch", "-n", "2", "--elastic"} + killed + settings("early", "cpu"), watched());
  EXPECT_EQ(ended.code, 137);
  EXPECT_THAT(ended.err, AllOf(HasSubstr("was killed before the program took part in the elastic job"),
                               Not(HasSubstr("takes no part"))));
}

TEST_F(Elastic, TooFewEndTheJob) {
  Program elastic(job(3, {"--min-processes", "3", "--max-restarts", "0"}, "few", {"--epochs", "60"}), watched());
  ASSERT_TRUE(elastic.wait_for("epoch  2/60"));
  kill_member(1);
  const auto ended = elastic.finish();
  EXPECT_EQ(ended.code, 1) << ended.err;
  EXPECT_THAT(ended.err, HasSubstr("the elastic job has 2 processes left, and goes on with at least 3"));
}

TEST_F(Elastic, WhenNoSuccessorsAreLeftTheOthersGoOn) {
  Program job(this->job(2, {"--max-restarts", "0"}, "fewer", {"--epochs", "40"}), watched());
  ASSERT_TRUE(job.wait_for("epoch  2/40"));
  kill_member(0);  // who keeps the run
  const auto ended = job.finish();
  ASSERT_EQ(ended.code, 0) << ended.err << ended.out;
  EXPECT_THAT(ended.err,
              AllOf(HasSubstr("process 0 was ended by signal 9"), HasSubstr("the others go on without it"),
                    HasSubstr("no successors are left, since at most 0 start (--max-restarts of lockstep launch)"),
                    Not(HasSubstr("in the place of")), Not(HasSubstr("error:"))));
  ASSERT_EQ(run_program(settings("undisturbed", "cpu") + Words{"--epochs", "40"}, watched()).code, 0);
  expect_same_epochs("fewer", 40);
}

TEST_F(Elastic, WhatCannotBeElasticIsRefused) {
  const auto without_grain = run_program(Words{"launch", "-n", "2", "--elastic", from_environment("LOCKSTEP_PROGRAM")} +
                                             train({"--name", "refused", "--devices", "cpu"}),
                                         surroundings());
  EXPECT_EQ(without_grain.code, 1);
  EXPECT_THAT(without_grain.err, HasSubstr("an elastic job and no --grain do not go together"));
  const auto sliced = [&](const Words& more) {
    return run_program(Words{"launch", "-n", "2", "--elastic", from_environment("LOCKSTEP_PROGRAM")} +
                           train({"--name", "refused", "--devices", "cpu", "--grain", "8", "--zero-stage"}) + more,
                       surroundings());
  };
  for (const char* const stage : {"1", "3"}) {
    EXPECT_THAT(sliced({stage}).err,
                AllOf(HasSubstr("an elastic job and --zero-stage do not go together: a slice of the optimizer is lost"),
                      HasSubstr("--resume auto"), HasSubstr("launch starts all of them again (`max_restarts`)")));
  }
  const auto fits_sliced = run_program(job_of(2, {}, {ranks_program(), "fits", "cpu", "runs/sliced"}), watched());
  EXPECT_EQ(fits_sliced.code, 3) << fits_sliced.err;
  EXPECT_THAT(fits_sliced.err,
              AllOf(HasSubstr("an elastic job and `zero_stage` do not go together"), HasSubstr("`resume` auto"),
                    HasSubstr("launch starts all of them again (`max_restarts`)")));
  EXPECT_FALSE(std::filesystem::exists(work_ / "runs/sliced"));
  EXPECT_FALSE(std::filesystem::exists(work_ / "runs/refused"));

  const auto other_program =
      run_program({"launch", "-n", "2", "--elastic", "/bin/sh", "-c", "test $RANK != 1 || kill -9 $$"}, watched());
  EXPECT_EQ(other_program.code, 137);
  EXPECT_THAT(other_program.err, HasSubstr("was killed before the program took part in the elastic job"));
}

}  // namespace elastic_test
