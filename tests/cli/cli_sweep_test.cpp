// Labels: program
// lockstep sweep: the grid, what is kept of it, how the same command goes on, and what one run's end means for others.
#include <algorithm>
#include <chrono>
#include <filesystem>
#include <thread>
#include <tuple>

#include "cli_fixture.hpp"
#include "trainer/checkpoint_folder.hpp"

namespace cli_sweep_test {

namespace fs = std::filesystem;
using lockstep::Cli;
using lockstep::Finished;
using lockstep::Program;
using lockstep::ReportData;
using lockstep::run_program;
using testing::AllOf;
using testing::ContainsRegex;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

class CliSweep : public Cli {
 protected:
  // A sweep of a small network, in runs/grid.
  std::vector<std::string> words(const std::vector<std::string>& more) const {
    std::vector<std::string> all = {"sweep",   "--name", "grid",    "--data-dir", images_.path().string(),
                                    "--model", "mlp",    "--width", "0.0625",     "--momentum",
                                    "0.5"};
    all.insert(all.end(), more.begin(), more.end());
    return all;
  }

  Finished sweep(const std::vector<std::string>& more) const { return run_program(words(more), surroundings()); }

  bool wait_for_checkpoint(const std::string& run) const {
    return lockstep::comes_true(
        [&] { return !lockstep::newest_checkpoint(work_ / "runs/grid" / run / "checkpoints").empty(); });
  }

  std::vector<std::string> kept() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(work_ / "runs/grid")) names.push_back(entry.path().filename());
    std::sort(names.begin(), names.end());
    return names;
  }
};

TEST_F(CliSweep, TrainsTheGridAndLaterWhatIsNew) {
  const Finished first = sweep({"--devices", "cpu", "2xcpu", "--batch-size", "60", "--lr", "0.05", "--epochs", "2"});
  ASSERT_EQ(first.code, 0) << first.err;
  EXPECT_THAT(kept(), ElementsAre("2xcpu_batch60_lr0.05", "cpu_batch60_lr0.05", "report.html", "table.txt"));
  EXPECT_THAT(first.out, AllOf(HasSubstr("2 runs in runs/grid\n"),
                               ContainsRegex("\n2xcpu_batch60_lr0.05: test acc: 0[.][0-9]+, [0-9.]+ sec/epoch\n")));
  const auto history = metrics("grid/2xcpu_batch60_lr0.05");
  ASSERT_EQ(history.size(), 2u);
  EXPECT_NEAR(history[1].train_loss, metrics("grid/cpu_batch60_lr0.05")[1].train_loss, 1e-4);  // it did train, equally
  EXPECT_LT(history[1].train_loss, history[0].train_loss);

  const std::string before = work_.read("runs/grid/2xcpu_batch60_lr0.05/metrics.jsonl");
  const Finished more =
      sweep({"--devices", "cpu", "2xcpu", "--batch-size", "60", "--lr", "0.05", "0.1", "--epochs", "2"});
  ASSERT_EQ(more.code, 0) << more.err;
  EXPECT_THAT(more.out, AllOf(HasSubstr("4 runs in runs/grid\n"), HasSubstr("\n2xcpu_batch60_lr0.1: test acc")));
  EXPECT_EQ(work_.read("runs/grid/2xcpu_batch60_lr0.05/metrics.jsonl"), before);  // with its seconds
  const std::string table = work_.read("runs/grid/table.txt");
  EXPECT_THAT(more.out, HasSubstr(table));
  EXPECT_THAT(table, HasSubstr("mlp, width 0.0625 on fashion-mnist, 2 epochs of sgd, momentum 0.5, seed 1\n"));
  char accuracy[20];
  std::snprintf(accuracy, sizeof accuracy, "%.4f", history[1].test_accuracy);
  EXPECT_THAT(table, ContainsRegex(std::string("\n  2xcpu +60 +0.05 +none +0.05 +") + accuracy));
  const ReportData report(work_ / "runs/grid/report.html");
  EXPECT_EQ(report.all()["runs"].size(), 4u);
  const auto& chart = report.all()["charts"][0];
  EXPECT_EQ(chart["x"], "learning rate");
  EXPECT_THAT(chart["lines"][0]["name"].get<std::string>(), HasSubstr("2xcpu, batch 60"));
  EXPECT_EQ(chart["lines"][0]["points"][0], nlohmann::json({0.05, history[1].test_accuracy}));

  const Finished other =
      sweep({"--devices", "cpu", "--batch-size", "60", "--lr", "0.05", "--epochs", "2", "--seed", "2"});
  EXPECT_EQ(other.code, 1);
  EXPECT_THAT(other.out, ContainsRegex("cpu_batch60_lr0.05: error: .*its run has seed 1, and this one 2"));
}

TEST_F(CliSweep, GoesOnWhereItWasStoppedOrKilled) {
  const std::vector<std::string> flags = {"--devices", "cpu", "--batch-size", "20", "30", "--lr", "0.05", "--epochs"};
  const auto with_epochs = [&](const std::string& epochs) {
    std::vector<std::string> all = flags;
    all.push_back(epochs);
    return words(all);
  };
  for (const int signal : {SIGINT, SIGKILL}) {
    Program program(with_epochs("100000"), surroundings());
    ASSERT_TRUE(wait_for_checkpoint("cpu_batch20_lr0.05"));
    program.send(signal);
    const Finished ended = program.finish();
    if (signal == SIGINT) {
      EXPECT_EQ(ended.code, 130);
      EXPECT_THAT(ended.out, HasSubstr("\nstopped; the same command goes on\n"));
    }
    EXPECT_THAT(kept(), ElementsAre("cpu_batch20_lr0.05"));

    const auto begun = metrics("grid/cpu_batch20_lr0.05");
    const Finished again = run_program(with_epochs(std::to_string(begun.size() + 2)), surroundings());
    ASSERT_EQ(again.code, 0) << again.err << again.out;
    const auto whole = metrics("grid/cpu_batch20_lr0.05");
    ASSERT_EQ(whole.size(), begun.size() + 2);
    EXPECT_EQ(whole[0].seconds, begun[0].seconds);  // was not trained again
    EXPECT_EQ(metrics("grid/cpu_batch30_lr0.05").size(), whole.size());
    fs::remove_all(work_ / "runs");
  }
}

TEST_F(CliSweep, ASecondOneAtOnceLeavesARunAloneThatTheFirstOneTrains) {
  const std::vector<std::string> flags = {"--devices", "cpu", "--batch-size", "20"};
  const auto with = [&](const std::vector<std::string>& more) {
    std::vector<std::string> all = flags;
    all.insert(all.end(), more.begin(), more.end());
    return words(all);
  };
  Program first(with({"--lr", "0.05", "--epochs", "100000"}), surroundings());
  ASSERT_TRUE(wait_for_checkpoint("cpu_batch20_lr0.05"));
  const Finished second = run_program(with({"--lr", "0.05", "0.1", "--epochs", "20"}), surroundings());
  EXPECT_EQ(second.code, 1);
  EXPECT_THAT(second.out, AllOf(ContainsRegex("\ncpu_batch20_lr0.05: error: [^\n]*another process"),
                                HasSubstr("\ncpu_batch20_lr0.1: test acc")));
  EXPECT_THAT(second.err, HasSubstr("the same command tries them again: cpu_batch20_lr0.05\n"));
  first.send(SIGINT);
  EXPECT_EQ(first.finish().code, 130);

  const auto begun = metrics("grid/cpu_batch20_lr0.05");
  const Finished again =
      run_program(with({"--lr", "0.05", "--epochs", std::to_string(begun.size() + 1)}), surroundings());
  EXPECT_EQ(again.code, 0) << again.err << again.out;
  const auto whole = metrics("grid/cpu_batch20_lr0.05");
  ASSERT_EQ(whole.size(), begun.size() + 1);
  EXPECT_EQ(whole[0].seconds, begun[0].seconds);
}

TEST_F(CliSweep, ARunThatFailsLeavesTheOthersAndALossThatIsNanIsNoFailure) {
  fs::create_directories(work_ / "runs/grid/cpu_batch60_lr0.05");
  work_.write("runs/grid/cpu_batch60_lr0.05/report.html", "precious");
  const Finished run =
      sweep({"--devices", "cpu", "--batch-size", "60", "--lr", "0.05", "0.1", "1e30", "--epochs", "1"});
  EXPECT_EQ(run.code, 1);
  EXPECT_THAT(run.out, AllOf(HasSubstr("cpu_batch60_lr0.05: error: "), HasSubstr("already holds a run's report.html"),
                             ContainsRegex("\ncpu_batch60_lr1e[+]30: test acc: [0-9.]+, .*not finite any more\n"),
                             ContainsRegex("\n  cpu +60 +0.05 +none +0.05 +- +- +-\n"),
                             ContainsRegex("\n  cpu +60 +1e[+]30 .* nan\n")));
  EXPECT_THAT(run.err, HasSubstr("some runs failed, and the same command tries them again: cpu_batch60_lr0.05\n"));
  EXPECT_EQ(metrics("grid/cpu_batch60_lr0.1").size(), 1u);
  EXPECT_EQ(work_.read("runs/grid/cpu_batch60_lr0.05/report.html"), "precious");
}

TEST_F(CliSweep, ComparesRulesForLargerBatches) {
  const Finished run = sweep({"--devices", "cpu", "--batch-size", "60", "240", "--lr", "0.01", "--scale-lr", "none",
                              "sqrt", "linear", "--reference-batch", "60", "--warmup", "0.5", "--epochs", "1"});
  ASSERT_EQ(run.code, 0) << run.err;
  EXPECT_THAT(kept(), ElementsAre("cpu_batch240_lr0.01", "cpu_batch240_lr0.01_linear", "cpu_batch240_lr0.01_sqrt",
                                  "cpu_batch60_lr0.01", "report.html", "table.txt"));
  EXPECT_EQ(metrics("grid/cpu_batch60_lr0.01")[0].lr, 0.01);
  EXPECT_EQ(metrics("grid/cpu_batch240_lr0.01_sqrt")[0].lr, 0.02);  // the second step's rate, after the warm-up
  EXPECT_EQ(metrics("grid/cpu_batch240_lr0.01_linear")[0].lr, 0.04);
  EXPECT_THAT(work_.read("runs/grid/table.txt"), ContainsRegex("\n  cpu +240 +0.01 +linear +0.04 "));
  const ReportData report(work_ / "runs/grid/report.html");
  EXPECT_EQ(report.all()["charts"][0]["x"], "batch size");
  EXPECT_EQ(report.all()["charts"][0]["lines"][2]["name"], "cpu, lr 0.01, sqrt");
}

TEST_F(CliSweep, RefusesWhatCannotBeBeforeAnythingRuns) {
  for (const auto& [flags, code, part] : std::vector<std::tuple<std::vector<std::string>, int, std::string>>{
           {{"--lr", "0.1", "x"}, 2, "--lr: x is not a number"},
           {{"--devices", "cpu", "tpu"}, 2, "tpu"},
           {{"--scale-lr", "none", "square", "--reference-batch", "30"}, 2, "\"square\""},
           {{"--scale-lr", "linear", "--batch-size", "30", "60"}, 2, "--reference-batch says"},
           {{"--batch-size", "30", "60", "--accumulate", "31"}, 2, "--accumulate"},
           {{"--batch-size", "30", "301"}, 1, "the batch size is 301"},
           {{"--trace", "x"}, 2, "sweep has no option --trace"}}) {
    const Finished run = sweep(flags);
    EXPECT_EQ(run.code, code) << run.err;
    EXPECT_THAT(run.err, HasSubstr(part));
    EXPECT_THAT(work_.names(), IsEmpty());
  }
  const Finished nameless = run_program({"sweep", "--lr", "0.1"}, surroundings());
  EXPECT_EQ(nameless.code, 2);
  EXPECT_THAT(nameless.err, HasSubstr("--name is missing"));
  auto launched = surroundings();
  launched.environment.insert(
      launched.environment.end(),
      {"RANK=0", "WORLD_SIZE=2", "LOCAL_RANK=0", "LOCAL_WORLD_SIZE=2", "MASTER_ADDR=127.0.0.1", "MASTER_PORT=1"});
  const Finished rank = run_program(words({"--lr", "0.1"}), launched);
  EXPECT_EQ(rank.code, 1);
  EXPECT_THAT(rank.err, HasSubstr("without a launcher"));
  EXPECT_THAT(work_.names(), IsEmpty());

  fs::create_directories(work_ / "runs/run");
  work_.write("runs/run/config.json", "{}");
  EXPECT_THAT(sweep({"--lr", "0.1", "--name", "run"}).err, HasSubstr("runs/run is the folder of a run"));
}

}  // namespace cli_sweep_test
