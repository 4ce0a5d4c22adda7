// Labels: program
// lockstep sweep: the grid, what is kept of it, how the same command goes on, and what one run's end means for others.
#include <lockstep/devices/devices.hpp>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <thread>
#include <tuple>

#include "cli_fixture.hpp"
#include "io/folder_lock.hpp"
#include "support/time_limits.hpp"

namespace cli_sweep_test {

namespace fs = std::filesystem;
using lockstep::Cli;
using lockstep::Finished;
using lockstep::Program;
using lockstep::run_program;
using testing::AllOf;
using testing::ContainsRegex;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

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

  static bool appears(const fs::path& file) {
    for (int i = 0; i < 6000 && !fs::exists(file); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    return fs::exists(file);
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
  EXPECT_THAT(kept(), ElementsAre(".lock", "2xcpu_batch60_lr0.05", "cpu_batch60_lr0.05", "plot.svg", "table.md"));
  EXPECT_THAT(first.out, HasSubstr("\n2 runs in runs/grid, 0 of them finished\n"));
  EXPECT_THAT(first.out, ContainsRegex("\n2xcpu_batch60_lr0.05: test acc: 0[.][0-9]+, [0-9.]+ sec/epoch\n"));
  const auto history = metrics("grid/2xcpu_batch60_lr0.05");
  ASSERT_EQ(history.size(), 2u);
  EXPECT_NEAR(history[1].train_loss, metrics("grid/cpu_batch60_lr0.05")[1].train_loss, 1e-4);  // it did train, equally
  EXPECT_LT(history[1].train_loss, history[0].train_loss);

  const std::string before = work_.read("runs/grid/2xcpu_batch60_lr0.05/metrics.jsonl");
  const Finished more = sweep(
      {"--devices", "cpu", "2xcpu", "--batch-size", "60", "--lr", "0.05", "0.1", "--epochs", "2", "--target", "0.01"});
  ASSERT_EQ(more.code, 0) << more.err;
  EXPECT_THAT(more.out, AllOf(HasSubstr("\n4 runs in runs/grid, 2 of them finished\n"),
                              HasSubstr("\n2xcpu_batch60_lr0.1: test acc"), Not(HasSubstr("lr0.05: "))));
  EXPECT_EQ(work_.read("runs/grid/2xcpu_batch60_lr0.05/metrics.jsonl"), before);  // with its seconds
  const std::string table = work_.read("runs/grid/table.md");
  EXPECT_THAT(more.out, HasSubstr(table));
  EXPECT_THAT(table, HasSubstr("mlp, width 0.0625 on fashion-mnist, 2 epochs of sgd, momentum 0.5, seed 1."));
  char row[100];
  std::snprintf(row, sizeof row, "\n|   2xcpu |    60 | 0.05 | none |      0.05 |   %.4f | %.4f |              1 |",
                history[1].test_accuracy, std::max(history[0].test_accuracy, history[1].test_accuracy));
  EXPECT_THAT(table, HasSubstr(row));
  const std::string plot = work_.read("runs/grid/plot.svg");
  EXPECT_THAT(plot, AllOf(HasSubstr("<svg"), HasSubstr("2xcpu, batch 60"), HasSubstr(">learning rate<")));
}

TEST_F(CliSweep, GoesOnWhereItWasKilledOrStopped) {
  const std::vector<std::string> axes = {"--devices", "cpu", "--batch-size", "20", "30", "--lr", "0.05", "--jobs", "1"};
  const auto with_epochs = [&](const std::string& epochs) {
    std::vector<std::string> all = axes;
    all.insert(all.end(), {"--epochs", epochs});
    return words(all);
  };
  ASSERT_EQ(run_program(with_epochs("3"), surroundings()).code, 0);
  const auto whole = metrics("grid/cpu_batch20_lr0.05");

  // As a kill leaves it: one run after its second epoch, the other in its first.
  const fs::path first = work_ / "runs/grid/cpu_batch20_lr0.05", second = work_ / "runs/grid/cpu_batch30_lr0.05";
  fs::remove(first / "checkpoints/epoch-0003.safetensors");
  std::string text = work_.read(first / "metrics.jsonl");
  const std::string kept = text.substr(0, text.rfind("{\"epoch\":3"));
  work_.write(first / "metrics.jsonl", kept);
  fs::remove_all(second / "checkpoints");
  fs::remove(second / "metrics.jsonl");
  const Finished again = run_program(with_epochs("3"), surroundings());
  ASSERT_EQ(again.code, 0) << again.err;
  EXPECT_THAT(again.out, HasSubstr(", 0 of them finished\n"));
  EXPECT_EQ(work_.read(first / "metrics.jsonl").substr(0, kept.size()), kept);  // trained once, with its seconds
  EXPECT_EQ(metrics("grid/cpu_batch20_lr0.05")[2].train_loss, whole[2].train_loss);
  EXPECT_EQ(metrics("grid/cpu_batch30_lr0.05").size(), 3u);

  // Ctrl-C while they are at work, both at once where there are cores for two.
  fs::remove_all(work_ / "runs");
  std::vector<std::string> endless = axes;
  endless.back() = "2";
  endless.insert(endless.end(), {"--epochs", "100000"});
  Program program(words(endless), surroundings());
  ASSERT_TRUE(program.wait_for("0 of them finished"));
  EXPECT_TRUE(appears(first / "metrics.jsonl"));
  if (lockstep::cpu_cores() > 1) EXPECT_TRUE(appears(second / "metrics.jsonl"));
  const auto start = std::chrono::steady_clock::now();
  program.send(SIGINT);
  const Finished stopped = program.finish();
  EXPECT_EQ(stopped.code, 130);
  EXPECT_LT(std::chrono::steady_clock::now() - start, lockstep::kSlowdown * std::chrono::seconds(10));
  EXPECT_THAT(stopped.out, HasSubstr("\nstopped; 0 of 2 runs are finished, and the same command goes on\n"));
}

TEST_F(CliSweep, GoesOnFromAWholeCheckpointIfTheNewestIsDamaged) {
  const std::vector<std::string> flags = {"--devices", "cpu", "--batch-size", "30", "--lr", "0.05",
                                          "--epochs",  "3",   "--keep-last",  "100"};
  ASSERT_EQ(sweep(flags).code, 0);
  const std::string name = "cpu_batch30_lr0.05";
  const auto whole = metrics("grid/" + name);
  const fs::path run = work_ / "runs/grid" / name;
  const auto damage = [&](const std::string& checkpoint) {
    std::string bytes = work_.read(run / "checkpoints" / checkpoint);
    bytes[bytes.size() - 5] ^= 1;
    work_.write(run / "checkpoints" / checkpoint, bytes);
  };
  const auto stop_after_two_epochs = [&] {
    fs::remove(run / "checkpoints/epoch-0003.safetensors");
    const std::string text = work_.read(run / "metrics.jsonl");
    work_.write(run / "metrics.jsonl", text.substr(0, text.rfind("{\"epoch\":3")));
    damage("epoch-0002.safetensors");
  };
  stop_after_two_epochs();
  const Finished earlier = sweep(flags);
  EXPECT_EQ(earlier.code, 0) << earlier.err;
  EXPECT_THAT(earlier.err,
              AllOf(HasSubstr("lockstep: warning: " + name + ": cannot go on from 'runs/grid/" + name +
                              "/checkpoints/epoch-0002.safetensors': it is damaged"),
                    HasSubstr("; the run goes on from runs/grid/" + name + "/checkpoints/epoch-0001.safetensors\n")));
  ASSERT_EQ(metrics("grid/" + name).size(), 3u);
  EXPECT_EQ(metrics("grid/" + name)[0].seconds, whole[0].seconds);  // was not trained again
  EXPECT_EQ(metrics("grid/" + name)[2].train_loss, whole[2].train_loss);
  EXPECT_EQ(sweep(flags).err, "");  // it is finished, with nothing damaged any more

  stop_after_two_epochs();
  damage("epoch-0001.safetensors");
  const Finished anew = sweep(flags);
  EXPECT_EQ(anew.code, 0) << anew.err;
  EXPECT_THAT(anew.err, HasSubstr("; there is no whole one before it, so the run begins anew\n"));
  ASSERT_EQ(metrics("grid/" + name).size(), 3u);
  EXPECT_EQ(metrics("grid/" + name)[2].train_loss, whole[2].train_loss);

  // As a sweep leaves it that is killed while it clears the folder.
  fs::remove(run / "metrics.jsonl");
  fs::remove_all(run / "checkpoints");
  const Finished half_cleared = sweep(flags);
  EXPECT_EQ(half_cleared.code, 0) << half_cleared.err;
  EXPECT_EQ(metrics("grid/" + name).size(), 3u);
}

TEST_F(CliSweep, ARunThatFailsLeavesTheOthersAndALossThatIsNanIsNoFailure) {
  fs::create_directories(work_ / "runs/grid/cpu_batch60_lr0.05");
  work_.write("runs/grid/cpu_batch60_lr0.05/curve.svg", "precious");
  const Finished run =
      sweep({"--devices", "cpu", "--batch-size", "60", "--lr", "0.05", "0.1", "1e30", "--epochs", "1"});
  EXPECT_EQ(run.code, 1);
  EXPECT_THAT(run.out, AllOf(HasSubstr("cpu_batch60_lr0.05: error: "), HasSubstr("already holds a run's curve.svg"),
                             ContainsRegex("\ncpu_batch60_lr1e[+]30: test acc: [0-9.]+, .*not finite any more\n"),
                             ContainsRegex("\n[|]     cpu [|]    60 [|]  0.05 [|] none [|]      0.05 [|]        - [|]"),
                             ContainsRegex("\n[|]     cpu [|]    60 [|] 1e[+]30 .*[|]        nan [|]\n")));
  EXPECT_THAT(run.err, HasSubstr("1 of 3 runs failed, and the same command tries them again: cpu_batch60_lr0.05\n"));
  EXPECT_EQ(metrics("grid/cpu_batch60_lr0.1").size(), 1u);
  EXPECT_EQ(work_.read("runs/grid/cpu_batch60_lr0.05/curve.svg"), "precious");
}

TEST_F(CliSweep, ComparesRulesForLargerBatches) {
  const Finished run = sweep({"--devices", "cpu", "--batch-size", "60", "240", "--lr", "0.01", "--scale-lr", "none",
                              "sqrt", "linear", "--reference-batch", "60", "--warmup", "0.5", "--epochs", "1"});
  ASSERT_EQ(run.code, 0) << run.err;
  EXPECT_THAT(kept(), ElementsAre(".lock", "cpu_batch240_lr0.01", "cpu_batch240_lr0.01_linear",
                                  "cpu_batch240_lr0.01_sqrt", "cpu_batch60_lr0.01", "plot.svg", "table.md"));
  EXPECT_EQ(metrics("grid/cpu_batch60_lr0.01")[0].lr, 0.01);
  EXPECT_EQ(metrics("grid/cpu_batch240_lr0.01_sqrt")[0].lr, 0.02);  // of the second step, when the warm-up is over
  EXPECT_EQ(metrics("grid/cpu_batch240_lr0.01_linear")[0].lr, 0.04);
  EXPECT_THAT(work_.read("runs/grid/table.md"), AllOf(HasSubstr("|   240 | 0.01 | linear |      0.04 |"),
                                                      HasSubstr("1 epoch of sgd"), HasSubstr("0.5 of them warm-up")));
  EXPECT_THAT(work_.read("runs/grid/plot.svg"), AllOf(HasSubstr("cpu, lr 0.01, sqrt"), HasSubstr(">batch size<")));
}

TEST_F(CliSweep, RefusesWhatCannotBeBeforeAnythingRuns) {
  for (const auto& [flags, code, part] : std::vector<std::tuple<std::vector<std::string>, int, std::string>>{
           {{"--lr", "0.1", "x"}, 2, "--lr: x is not a number"},
           {{"--devices", "cpu", "tpu"}, 2, "tpu"},
           {{"--scale-lr", "none", "square"}, 2, "\"square\""},
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
}

TEST_F(CliSweep, KeepsToItsOwnFolder) {
  const std::vector<std::string> axes = {"--devices", "cpu", "--batch-size", "60", "--lr", "0.05", "--epochs", "1"};
  const Finished first = sweep(axes);
  ASSERT_EQ(first.code, 0) << first.err;
  EXPECT_THAT(first.out, HasSubstr("\n1 run in runs/grid, 0 of them finished\n"));
  std::vector<std::string> other = axes;
  other.insert(other.end(), {"--seed", "2", "--lr", "0.1"});
  const Finished seed = sweep(other);
  EXPECT_EQ(seed.code, 1);
  EXPECT_THAT(seed.err, HasSubstr("runs/grid/cpu_batch60_lr0.05 holds a run with another seed than this sweep's"));
  EXPECT_FALSE(fs::exists(work_ / "runs/grid/cpu_batch60_lr0.1"));

  lockstep::io::FolderLock lock;
  ASSERT_TRUE(lock.take(work_ / "runs/grid"));
  const Finished second = sweep(axes);
  EXPECT_EQ(second.code, 1);
  EXPECT_THAT(second.err, HasSubstr("another sweep trains in runs/grid"));

  fs::create_directories(work_ / "runs/run");
  work_.write("runs/run/config.json", "{}");
  other = axes;
  other.insert(other.end(), {"--name", "run"});
  EXPECT_THAT(sweep(other).err, HasSubstr("runs/run is the folder of a run"));
}

}  // namespace cli_sweep_test
