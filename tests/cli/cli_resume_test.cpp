// lockstep train --resume: a run that was killed or stopped goes on where it was, with the results of an unbroken one.
#include <fstream>

#include "cli_fixture.hpp"

namespace cli_resume_test {

namespace fs = std::filesystem;
using lockstep::Cli;
using lockstep::EpochMetrics;
using lockstep::Finished;
using lockstep::Program;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

class CliResume : public Cli {
 protected:
  Finished run(const std::vector<std::string>& arguments) const { return Program(arguments, surroundings()).finish(); }

  static void expect_same(const std::vector<EpochMetrics>& found, const std::vector<EpochMetrics>& expected) {
    ASSERT_EQ(found.size(), expected.size());
    for (size_t i = 0; i < found.size(); ++i) {
      EXPECT_EQ(found[i].train_loss, expected[i].train_loss) << i;
      EXPECT_EQ(found[i].test_accuracy, expected[i].test_accuracy) << i;
    }
  }
};

TEST_F(CliResume, GoesOnAfterKillAndAfterAHangUp) {
  for (const int signal : {SIGKILL, SIGHUP}) {
    const std::string name = "run" + std::to_string(signal);
    Program program(train({"--epochs", "100000", "--checkpoint-every", "3", "--name", name}), surroundings());
    ASSERT_TRUE(program.wait_for("epoch      3/100000"));
    program.send(signal);
    const Finished stopped = program.finish();
    if (signal == SIGHUP) EXPECT_EQ(stopped.code, 129);
    if (signal == SIGHUP)
      EXPECT_THAT(stopped.out, HasSubstr("\nto go on: lockstep train --resume runs/" + name + "\n"));

    const size_t epochs = metrics(name).size() + 3;
    const Finished resumed = run({"train", "--resume", "last", "--epochs", std::to_string(epochs)});
    EXPECT_EQ(resumed.code, 0) << resumed.err;
    EXPECT_THAT(resumed.out, AllOf(HasSubstr("goes on from      runs/" + name + "/checkpoints/epoch-"),
                                   HasSubstr("test acc: "), Not(HasSubstr("epoch  1/"))));
    const std::string whole = "whole" + name;
    EXPECT_EQ(run(train({"--epochs", std::to_string(epochs), "--name", whole})).code, 0);
    expect_same(metrics(name), metrics(whole));
    fs::remove_all(work_ / "runs" / whole);  // or else it were the last one
  }
}

TEST_F(CliResume, SaysWhatCannotBeResumed) {
  EXPECT_THAT(run({"train", "--resume", "last"}).err, HasSubstr("no run in 'runs' has a checkpoint"));
  EXPECT_THAT(run({"train", "--resume", "runs/x"}).err, HasSubstr("there is no run, and no checkpoint, 'runs/x'"));
  EXPECT_EQ(run(train({"--name", "a"})).code, 0);
  EXPECT_THAT(run({"train", "--resume", "runs/a", "--lr", "0.7"}).err,
              HasSubstr("its run has lr 0.2, and this one 0.7; a run goes on as it began"));
  EXPECT_THAT(run({"train", "--resume", "runs/a", "--config", "runs/a/config.json"}).err, HasSubstr("--config"));
  fs::resize_file(work_ / "runs/a/checkpoints/epoch-0002.safetensors", 1000);
  const Finished resumed = run({"train", "--resume", "last"});
  EXPECT_EQ(resumed.code, 0);
  EXPECT_THAT(resumed.err, HasSubstr("; the run goes on from runs/a/checkpoints/epoch-0001.safetensors\n"));
  EXPECT_THAT(run(train({"--resume", "auto"})).err, HasSubstr("--resume auto needs --name"));
}

// A run that was stopped in the first epoch, or killed before the first checkpoint.
TEST_F(CliResume, AutoGoesOnOrBegins) {
  const auto with = train({"--resume", "auto", "--name", "a", "--epochs", "2"});
  fs::create_directories(work_ / "runs/a");
  std::ofstream(work_ / "runs/a/config.json") << "{}";
  const Finished begun = run(with);
  EXPECT_EQ(begun.code, 0) << begun.err;
  EXPECT_THAT(begun.out, Not(HasSubstr("goes on from")));
  fs::remove(work_ / "runs/a/checkpoints/epoch-0002.safetensors");
  const auto whole = metrics("a");
  const Finished resumed = run(with);
  EXPECT_EQ(resumed.code, 0) << resumed.err;
  EXPECT_THAT(resumed.out, HasSubstr("goes on from      runs/a/checkpoints/epoch-0001.safetensors"));
  expect_same(metrics("a"), whole);
}

TEST_F(CliResume, AutoBeginsAnewAfterAKillBetweenTheFirstEpochsFilesAndItsCheckpoint) {
  EXPECT_EQ(run(train({"--name", "a"})).code, 0);
  fs::remove_all(work_ / "runs/a/checkpoints");
  const std::string both = work_.read("runs/a/metrics.jsonl");
  work_.write("runs/a/metrics.jsonl", both.substr(0, both.find('\n') + 1));
  const Finished begun = run(train({"--resume", "auto", "--name", "a"}));
  EXPECT_EQ(begun.code, 0) << begun.err;
  EXPECT_THAT(begun.err, HasSubstr("warning: runs/a holds one finished epoch and no checkpoint to go on from, so the "
                                   "run begins anew in its place\n"));
  EXPECT_EQ(metrics("a").size(), 2u);

  EXPECT_EQ(run(train({"--name", "one", "--epochs", "1"})).code, 0);
  fs::remove_all(work_ / "runs/one/checkpoints");
  EXPECT_THAT(run(train({"--resume", "auto", "--name", "one"})).err, HasSubstr("runs/one already holds a run's"));

  EXPECT_EQ(run(train({"--name", "none", "--epochs", "1", "--keep-last", "0"})).code, 0);
  EXPECT_THAT(run(train({"--resume", "auto", "--name", "none"})).err, HasSubstr("runs/none already holds a run's"));
}

TEST_F(CliResume, GoesOnInAnotherFolderAndShowsItself) {
  EXPECT_EQ(run(train({"--name", "a", "--tensorboard"})).code, 0);
  const Finished resumed = run({"train", "--resume", "runs/a/checkpoints/epoch-0001.safetensors", "--name", "b"});
  EXPECT_EQ(resumed.code, 0) << resumed.err;
  expect_same(metrics("b"), metrics("a"));
  for (const char* name : {"a", "b"}) {  // the resumed one has a's settings
    size_t files = 0;
    for (const auto& entry : fs::directory_iterator(work_ / "runs" / name)) {
      if (!entry.path().filename().string().starts_with("events.out.tfevents.")) continue;
      ++files;
      EXPECT_GT(fs::file_size(entry.path()), 200u);
    }
    EXPECT_EQ(files, 1u) << name;
  }
}

}  // namespace cli_resume_test
