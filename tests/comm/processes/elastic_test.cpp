// Labels: processes program
// lockstep train under lockstep launch --elastic: killed processes change neither the weights nor the metrics.
#include <lockstep/models/models.hpp>

#include "cli/cli_fixture.hpp"
#include "running_job.hpp"

#include <csignal>
#include <memory>

namespace elastic_test {

using namespace lockstep;
using testing::AllOf;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

class Elastic : public Cli {
 protected:
  // Three processes, each of which leaves its number.
  Words job(const Words& launch, const Words& more) const {
    const Words noting = {"/bin/sh", "-c",
                          "echo $$ >\"$0/$LOCKSTEP_ELASTIC_MEMBER.new\"; "
                          "/bin/mv \"$0/$LOCKSTEP_ELASTIC_MEMBER.new\" \"$0/$LOCKSTEP_ELASTIC_MEMBER\"; exec \"$@\"",
                          notes_.path().string(), from_environment("LOCKSTEP_PROGRAM")};
    return Words{"launch", "-n", "3", "--elastic"} + launch + noting + settings("elastic", "cpu") + more;
  }

  // Curves would take most of the time.
  Surroundings without_gnuplot() const {
    return {.folder = work_.path(), .environment = {"PATH=" + notes_.path().string(), "LC_ALL=C.UTF-8"}};
  }

  Words settings(const std::string& name, const std::string& devices) const {
    return train({"--name", name, "--devices", devices, "--grain", "8", "--momentum", "0.9", "--lr", "0.02"});
  }

  void kill_member(int member, int signal = SIGKILL) const {
    const pid_t pid = pid_in(notes_ / std::to_string(member));
    ASSERT_GT(pid, 0) << "process " << member << " has not been started";
    ASSERT_EQ(kill(pid, signal), 0) << "process " << member << " has ended";
  }

  void expect_same_run(const std::string& run, const std::string& undisturbed) const {
    const auto actual = metrics(run), expected = metrics(undisturbed);
    ASSERT_EQ(actual.size(), expected.size());
    for (size_t i = 0; i < actual.size(); ++i) {
      EXPECT_EQ(actual[i].train_loss, expected[i].train_loss) << "epoch " << i + 1;
      EXPECT_EQ(actual[i].train_accuracy, expected[i].train_accuracy) << "epoch " << i + 1;
      EXPECT_EQ(actual[i].test_accuracy, expected[i].test_accuracy) << "epoch " << i + 1;
      EXPECT_EQ(actual[i].weights, expected[i].weights) << "epoch " << i + 1;
    }
  }

  ScratchFolder notes_;
};

TEST_F(Elastic, KillsChangeNoBit) {
  const Words epochs = {"--epochs", "60"};
  Program elastic(job({}, epochs), without_gnuplot());
  ASSERT_TRUE(elastic.wait_for("epoch  2/60"));
  kill_member(0);  // who keeps the run
  ASSERT_TRUE(elastic.wait_for("process 3 has joined"));
  kill_member(2);
  kill_member(1);  // the successor alone is left
  ASSERT_TRUE(elastic.wait_for("process 4 has joined"));
  kill_member(3);  // a successor, who keeps the run by now
  const auto ended = elastic.finish();
  ASSERT_EQ(ended.code, 0) << ended.err << ended.out;
  EXPECT_THAT(ended.err, AllOf(HasSubstr("process 0 was ended by signal 9"), HasSubstr("the others go on without it"),
                               HasSubstr("process 3 starts in the place of rank 0"), Not(HasSubstr("error:"))));
  EXPECT_THAT(ended.out, HasSubstr("the run is kept in runs/elastic"));

  ASSERT_EQ(run_program(settings("undisturbed", "2xcpu") + epochs, without_gnuplot()).code, 0);
  expect_same_run("elastic", "undisturbed");
  EXPECT_EQ(work_.read("runs/elastic/model.safetensors"), work_.read("runs/undisturbed/model.safetensors"));
}

// The others take it for gone after its silence, and the launcher ends it.
TEST_F(Elastic, OneThatStandsStillIsReplaced) {
  const Words more = {"--epochs", "60", "--silence", "1"};
  Program elastic(job({}, more), without_gnuplot());
  ASSERT_TRUE(elastic.wait_for("epoch  2/60"));
  kill_member(1, SIGSTOP);
  ASSERT_TRUE(elastic.wait_for("process 3 has joined"));
  const auto ended = elastic.finish();
  ASSERT_EQ(ended.code, 0) << ended.err << ended.out;
  ASSERT_EQ(run_program(settings("undisturbed", "2xcpu") + more, without_gnuplot()).code, 0);
  expect_same_run("elastic", "undisturbed");
}

TEST_F(Elastic, TooFewEndTheJob) {
  Program elastic(job({"--min-processes", "3", "--max-restarts", "0"}, {"--epochs", "60"}), without_gnuplot());
  ASSERT_TRUE(elastic.wait_for("epoch  2/60"));
  kill_member(1);
  const auto ended = elastic.finish();
  EXPECT_EQ(ended.code, 1) << ended.err;
  EXPECT_THAT(ended.err, HasSubstr("the elastic job has 2 processes left, and goes on with at least 3"));
}

TEST_F(Elastic, WhatCannotBeElasticIsRefused) {
  const auto without_grain = run_program(Words{"launch", "-n", "2", "--elastic", from_environment("LOCKSTEP_PROGRAM")} +
                                             train({"--name", "refused", "--devices", "cpu"}),
                                         surroundings());
  EXPECT_EQ(without_grain.code, 1);
  EXPECT_THAT(without_grain.err, HasSubstr("without a --grain the weights' bits depend on their number"));
  EXPECT_FALSE(std::filesystem::exists(work_ / "runs/refused"));

  const auto other_program =
      run_program({"launch", "-n", "2", "--elastic", "/bin/sh", "-c", "test $RANK != 1 || kill -9 $$"}, without_gnuplot());
  EXPECT_EQ(other_program.code, 137);
  EXPECT_THAT(other_program.err, HasSubstr("its program takes no part in --elastic"));
}

}  // namespace elastic_test
