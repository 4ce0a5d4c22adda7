// Labels: long
// lockstep train and eval with a pipe at the other end: what they print and keep, and what runs again.
#include <lockstep/devices/devices.hpp>

#include <fstream>
#include <regex>

#include "cli_fixture.hpp"

namespace cli_train_test {

namespace fs = std::filesystem;
using lockstep::Cli;
using lockstep::EpochMetrics;
using lockstep::Finished;
using lockstep::lines_of;
using lockstep::Program;
using lockstep::ReportData;
using lockstep::run_program;
using lockstep::ScratchFolder;
using testing::AllOf;
using testing::ContainsRegex;
using testing::EndsWith;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;
using testing::StartsWith;

std::string as_printed(const char* pattern, const EpochMetrics& m) {
  char text[200];
  std::snprintf(text, sizeof text, pattern, m.epoch, m.train_loss, m.train_accuracy, m.test_accuracy, m.seconds);
  return text;
}

class CliTrain : public Cli {
 protected:
  std::vector<std::string> names_of_runs() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(work_ / "runs")) names.push_back(entry.path().filename());
    return names;
  }
};

TEST_F(CliTrain, PrintsTheSettingsThenALinePerEpochThenTheSectionsLine) {
  auto around = surroundings();
  around.starts_itself = true;
  const Finished run = run_program(train({"--lr", "0.15", "--seed", "7", "--name", "first"}), around);
  ASSERT_EQ(run.code, 0) << run.err;
  EXPECT_THAT(run.err, IsEmpty());
  const auto lines = lines_of(run.out);
  ASSERT_EQ(lines.size(), 21u) << run.out;
  EXPECT_THAT(lines[0], ContainsRegex("^lockstep [0-9.]+, LibTorch 2\\.[0-9.]+$"));
  EXPECT_EQ(lines[1], "  model             lenet");
  EXPECT_EQ(lines[2],
            "  data              fashion-mnist in " + images_.path().string() + " (not the images as published)");
  EXPECT_EQ(lines[3], "  devices           [cpu, cpu], 2 ranks");
  EXPECT_EQ(lines[4], "  threads per rank  1");
  EXPECT_EQ(lines[5], "  batch size        32 over all ranks");
  EXPECT_EQ(lines[6], "  optimizer         sgd");
  EXPECT_EQ(lines[7], "  learning rate     0.15");
  EXPECT_EQ(lines[8], "  epochs            2");
  EXPECT_EQ(lines[9], "  seed              7");
  EXPECT_EQ(lines[10], "  precision         float32");
  EXPECT_EQ(lines[11], "  memory format     contiguous");
  EXPECT_EQ(lines[12], "  CUDA graph        no");
  EXPECT_EQ(lines[13], "  run folder        runs/first");
  EXPECT_EQ(lines[14], "");

  const auto kept = metrics("first");
  ASSERT_EQ(kept.size(), 2u);
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(lines[15 + i],
              as_printed("epoch %d/2  train loss %.4f  train acc %.4f  test acc %.4f  %.1f sec/epoch", kept[i]));
  }
  EXPECT_THAT(lines[18], ContainsRegex("^the run is kept in runs/first; peak memory [1-9][0-9]+ MB; "
                                       "waiting for data took [0-9]+\\.[0-9][0-9] % of the time; "
                                       "a rank sent 0\\.[0-9]+ MB per step$"));
  char last[100];
  std::snprintf(last, sizeof last, "test acc: %.2f, %.1f sec/epoch on [cpu, cpu]", kept[1].test_accuracy,
                (kept[0].seconds + kept[1].seconds) / 2);
  EXPECT_EQ(lines[19], "weights " + kept[1].weights);
  EXPECT_THAT(kept[1].weights, ContainsRegex("^[0-9a-f]{16}$"));
  EXPECT_NE(kept[0].weights, kept[1].weights);
  EXPECT_EQ(lines[20], last);
  EXPECT_THAT(run.out, Not(HasSubstr("\r")));
  EXPECT_THAT(run.out, Not(HasSubstr("synthetic")));
}

TEST_F(CliTrain, TakesTheRanksThatWereMeasuredFastestUnlessToldOthers) {
  if (lockstep::default_devices().size() < 2 || !lockstep::default_devices()[0].is_cpu()) GTEST_SKIP() << "one core";
  auto around = surroundings();
  around.environment.push_back("XDG_CACHE_HOME=" + work_.path().string());
  const auto train = [&](const std::string& name, const std::vector<std::string>& more = {}) {
    std::vector<std::string> arguments = {
        "train",    "--model", "mlp",    "--data-dir", images_.path().string(), "--batch-size", "32",
        "--epochs", "1",       "--name", name};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run_program(arguments, around).out;
  };
  EXPECT_THAT(train("measured"), HasSubstr(", the fastest way here"));
  size_t kept = 0;
  for (const auto& entry : fs::directory_iterator(work_ / "lockstep")) {
    if (lockstep::whole_file(entry.path()).find("ranks|") == std::string::npos) continue;
    std::ofstream(entry.path()) << "1";
    ++kept;
  }
  EXPECT_EQ(kept, 1u);
  EXPECT_THAT(train("kept"), HasSubstr("[cpu], 1 rank, the fastest way here"));
  EXPECT_THAT(train("told", {"--devices", "2xcpu"}), HasSubstr("[cpu, cpu], 2 ranks\n"));
}

TEST_F(CliTrain, ShowsNoEpochsIfAskedNotToAndEachSettingThatIsNotTheDefault) {
  const Finished run = run_program(train({"--progress", "none", "--silence", "9", "--keep-last", "1"}), surroundings());
  ASSERT_EQ(run.code, 0) << run.err;
  EXPECT_THAT(run.out, AllOf(HasSubstr("  batch size  "), HasSubstr("\ntest acc: "), Not(HasSubstr("epoch 1/2"))));
  // Options without words of their own are shown with values other than the defaults.
  EXPECT_THAT(run.out, AllOf(HasSubstr("\n  silence           9\n"), HasSubstr("\n  keep last         1\n"),
                             Not(HasSubstr("timeout"))));
}

TEST_F(CliTrain, SaysWhereverItPrintsThatDataAreSynthetic) {
  const Finished run = run_program({"train", "--data", "synthetic", "--model", "mlp", "--width", "0.0625",
                                    "--batch-size", "4096", "--epochs", "1", "--name", "made-up"},
                                   surroundings());
  ASSERT_EQ(run.code, 0) << run.err;
  EXPECT_THAT(run.out, ContainsRegex("\n  data +synthetic "));
  EXPECT_THAT(run.out, ContainsRegex("\nepoch 1/1 .* sec/epoch \\(synthetic data\\)\n"));
  EXPECT_THAT(run.out, HasSubstr("\nthe run is kept in runs/made-up (synthetic data); peak memory "));
  EXPECT_THAT(run.out, ContainsRegex("\ntest acc: .* \\(synthetic data\\)\n$"));
  for (const auto& line : lines_of(work_.read("runs/made-up/metrics.jsonl"))) {
    EXPECT_THAT(line, HasSubstr("\"data\":\"synthetic\""));
  }
  EXPECT_THAT(work_.read("runs/made-up/model.safetensors").substr(0, 200),
              HasSubstr("\"__metadata__\":{\"format\":\"pt\",\"data\":\"synthetic\","));
  EXPECT_THAT(work_.read("runs/made-up/report.html"), HasSubstr("synthetic"));
  const Finished eval = run_program({"eval", "runs/made-up"}, surroundings());
  EXPECT_THAT(eval.out, ContainsRegex("^test acc: .* \\(synthetic data\\)\n$")) << eval.err;
}

TEST_F(CliTrain, RunsAConfigurationAgain) {
  ASSERT_EQ(run_program(train({"--seed", "5", "--devices", "3xcpu", "--name", "first"}), surroundings()).code, 0);
  const Finished again =
      run_program({"train", "--config", "runs/first/config.json", "--name", "again"}, surroundings());
  ASSERT_EQ(again.code, 0) << again.err;
  EXPECT_THAT(again.out, AllOf(HasSubstr("runs/first/config.json\n"), HasSubstr("\n  run folder        runs/again\n"),
                               HasSubstr("on [cpu, cpu, cpu]\n")));
  const auto first = metrics("first"), second = metrics("again");
  ASSERT_EQ(second.size(), first.size());
  for (size_t i = 0; i < first.size(); ++i) {  // to the bit
    EXPECT_EQ(second[i].train_loss, first[i].train_loss);
    EXPECT_EQ(second[i].train_accuracy, first[i].train_accuracy);
    EXPECT_EQ(second[i].test_accuracy, first[i].test_accuracy);
  }
  EXPECT_EQ(work_.read("runs/again/model.safetensors"), work_.read("runs/first/model.safetensors"));
}

TEST_F(CliTrain, TrainsEvaluatesAndRepeatsOtherModels) {
  const Finished run = run_program(
      train({"--model", "alexnet", "--width", "0.05", "--image-size", "65", "--groups", "2", "--name", "first"}),
      surroundings());
  ASSERT_EQ(run.code, 0) << run.err;
  EXPECT_THAT(run.out, HasSubstr("\n  model             alexnet, width 0.05, images of 65 x 65, 2 groups\n"));
  const Finished eval = run_program({"eval", "runs/first", "--devices", "3xcpu"}, surroundings());
  ASSERT_EQ(eval.code, 0) << eval.err;
  char accuracy[40];
  std::snprintf(accuracy, sizeof accuracy, "test acc: %.4f ", metrics("first")[1].test_accuracy);
  EXPECT_THAT(eval.out, StartsWith(accuracy));

  const Finished again =
      run_program({"train", "--config", "runs/first/config.json", "--name", "again"}, surroundings());
  ASSERT_EQ(again.code, 0) << again.err;
  EXPECT_EQ(work_.read("runs/again/model.safetensors"), work_.read("runs/first/model.safetensors"));
  const Finished other = run_program({"train", "--config", "runs/first/config.json", "--name", "other", "--model",
                                      "resnet18", "--groups", "1", "--image-size", "9", "--memory-format", "auto"},
                                     surroundings());
  ASSERT_EQ(other.code, 0) << other.err;
  EXPECT_THAT(other.out, AllOf(HasSubstr("\n  model             resnet18, width 0.05, images of 9 x 9\n"),
                               HasSubstr("\n  memory format     channels-last\n")));
  EXPECT_THAT(work_.read("runs/other/config.json"), HasSubstr("\"memory_format\": \"channels-last\""));
}

TEST_F(CliTrain, LetsFlagsOverrideAConfiguration) {
  ASSERT_EQ(run_program(train({"--name", "first"}), surroundings()).code, 0);
  const Finished other = run_program({"train", "--name", "other", "--seed", "9", "--config", "runs/first/config.json",
                                      "--epochs", "1", "--devices", "cpu"},
                                     surroundings());
  ASSERT_EQ(other.code, 0) << other.err;
  EXPECT_THAT(other.out, AllOf(HasSubstr("  seed              9\n"), HasSubstr("  batch size        32 "),
                               HasSubstr("  devices           [cpu], 1 rank\n")));
  ASSERT_EQ(metrics("other").size(), 1u);
  EXPECT_NE(metrics("other")[0].train_loss, metrics("first")[0].train_loss);
}

TEST_F(CliTrain, TakesPrecisionMemoryFormatAndGraphFromFlagsAndConfigurations) {
  const Finished run = run_program(
      train({"--precision", "bf16", "--memory-format", "channels-last", "--name", "first"}), surroundings());
  ASSERT_EQ(run.code, 0) << run.err;
  EXPECT_THAT(run.out, AllOf(HasSubstr("\n  precision         bf16\n  memory format     channels-last\n")));
  std::string config = work_.read("runs/first/config.json");
  const std::string no = "\"cuda_graph\": false";
  ASSERT_NE(config.find(no), std::string::npos) << config;
  work_.write("runs/first/config.json", config.replace(config.find(no), no.size(), "\"cuda_graph\": true"));

  // A run with a graph, whose kind of device is not here: evaluated it is, and trained again if asked for no graph.
  const Finished eval = run_program({"eval", "runs/first"}, surroundings());
  ASSERT_EQ(eval.code, 0) << eval.err;
  char accuracy[40];
  std::snprintf(accuracy, sizeof accuracy, "test acc: %.4f ", metrics("first")[1].test_accuracy);
  EXPECT_THAT(eval.out, StartsWith(accuracy));
  std::vector<std::string> again = {"train", "--config", "runs/first/config.json", "--name", "again"};
  const Finished refused = run_program(again, surroundings());
  EXPECT_EQ(refused.code, 2);
  EXPECT_THAT(refused.err, HasSubstr("--cuda-graph and --devices without CUDA do not go together"));
  again.push_back("--cuda-graph=false");
  const Finished second = run_program(again, surroundings());
  ASSERT_EQ(second.code, 0) << second.err;
  EXPECT_EQ(metrics("again")[1].train_loss, metrics("first")[1].train_loss);
}

TEST_F(CliTrain, RunsAndEvaluatesARunOfAMachineWithOtherDevices) {
  ASSERT_EQ(run_program(train({"--name", "first"}), surroundings()).code, 0);
  std::string config = work_.read("runs/first/config.json");
  const std::string here = "\"cpu,cpu\"";
  ASSERT_NE(config.find(here), std::string::npos);
  work_.write("runs/first/config.json", config.replace(config.find(here), here.size(), "\"cuda:70,cuda:71\""));
  for (const auto& devices : {std::vector<std::string>{"--devices", "cpu"}, std::vector<std::string>{}}) {
    std::vector<std::string> eval = {"eval", "runs/first"};
    eval.insert(eval.end(), devices.begin(), devices.end());
    const Finished done = run_program(eval, surroundings());
    EXPECT_EQ(done.code, 0) << done.err;
  }
  std::vector<std::string> again = {"train", "--config", "runs/first/config.json", "--name", "again"};
  EXPECT_THAT(run_program(again, surroundings()).err, HasSubstr("cuda:70 is not there"));
  again.insert(again.end(), {"--devices", "cpu"});
  const Finished done = run_program(again, surroundings());
  EXPECT_EQ(done.code, 0) << done.err;
}

// Synthetic data take a moment to make: both runs have chosen a folder before either makes it.
TEST_F(CliTrain, TwoRunsAtOnceGetTwoFolders) {
  const std::vector<std::string> words = {"train", "--data", "synthetic", "--keep-last", "0"};  // nothing to keep
  Program one(words, surroundings());
  Program two(words, surroundings());
  EXPECT_TRUE(one.wait_for("run folder") && two.wait_for("run folder"));
  const auto names = names_of_runs();
  EXPECT_EQ(names.size(), 2u) << testing::PrintToString(names);
  for (Program* program : {&one, &two}) {
    program->send(SIGTERM);
    EXPECT_EQ(program->finish().code, 143);
  }
  // Both folders are gone, and "runs" too unless the run that made it ended first, while the other's folder was there.
  std::error_code gone;
  EXPECT_EQ(fs::directory_iterator(work_ / "runs", gone), fs::directory_iterator());
}

// Some network file systems have no locks: nobody can be kept out of a folder there.
TEST_F(CliTrain, AFolderThatCannotBeLockedIsAWarning) {
  const char* const library = std::getenv("LOCKSTEP_FAULTY_FILES");
  if (library == nullptr) GTEST_SKIP() << "not with sanitizers";
  auto without_locks = surroundings();
  without_locks.environment.push_back("LD_PRELOAD=" + std::string(library));
  without_locks.environment.push_back("FAULT_LOCK=" + std::to_string(ENOLCK));
  const auto words = train({"--model", "mlp", "--width", "0.125", "--name", "a", "--resume", "auto"});
  const Finished run = run_program(words, without_locks);
  EXPECT_EQ(run.code, 0) << run.err;
  EXPECT_THAT(run.err,
              HasSubstr("warning: runs/a cannot be locked (No locks available), as on some network file systems, "
                        "so a second run in it may not be refused"));

  fs::remove_all(work_ / "runs/a/checkpoints");
  fs::remove(work_ / "runs/a/metrics.jsonl");  // the folder of a run that was killed early, or that has just begun
  const Finished again = run_program(words, without_locks);
  EXPECT_EQ(again.code, 1);
  EXPECT_THAT(again.err,
              HasSubstr("(No locks available), as on some network file systems, so a process may still train "
                        "there. It holds nothing that a run could go on from: "));
  EXPECT_TRUE(fs::exists(work_ / "runs/a/model.safetensors"));
}

TEST_F(CliTrain, OfTwoRunsAtOnceWithOneNameOneIsRefused) {
  Program one({"train", "--data", "synthetic", "--name", "mine"}, surroundings());
  Program two({"train", "--data", "synthetic", "--name", "mine"}, surroundings());
  const bool first = one.wait_for("run folder"), second = two.wait_for("run folder");
  EXPECT_NE(first, second);
  EXPECT_TRUE(fs::exists(work_ / "runs/mine/config.json"));
  Program& refused = first ? two : one;
  Program& taken = first ? one : two;
  taken.send(SIGTERM);
  EXPECT_EQ(taken.finish().code, 143);
  EXPECT_THAT(refused.finish().err, HasSubstr("runs/mine already holds a run"));
}

TEST_F(CliTrain, AnErrorBeforeTheFirstEpochIsKeptLeavesNothing) {
  const ScratchFolder images;  // enough for an epoch of a second
  lockstep::write_small_images(images, 8000, 10);
  Program program({"train", "--data-dir", images.path().string(), "--devices", "1", "--name", "lost"}, surroundings());
  ASSERT_TRUE(program.wait_for("run folder"));
  fs::remove_all(work_ / "runs" / "lost");
  const Finished run = program.finish();
  EXPECT_EQ(run.code, 1);
  EXPECT_THAT(run.err, AllOf(HasSubstr("runs/lost/model.safetensors"), EndsWith("; no run is kept\n")));
  EXPECT_THAT(work_.names(), IsEmpty());
}

TEST_F(CliTrain, ALossThatIsNotFiniteIsNanAndAWarning) {
  const Finished run = run_program(train({"--lr", "1e30", "--name", "wild", "--on-nan", "go-on"}), surroundings());
  EXPECT_EQ(run.code, 0);
  EXPECT_THAT(run.out, AllOf(HasSubstr("epoch 2/2  train loss nan  train acc "), Not(HasSubstr("-nan"))));
  ASSERT_EQ(lines_of(run.err).size(), 1u) << run.err;
  EXPECT_THAT(run.err, AllOf(HasSubstr("lockstep: warning: "), HasSubstr("not finite"), HasSubstr("--lr than 1e+30")));
}

// The second epoch's learning rate is too large, and the weights that are kept are the first one's.
TEST_F(CliTrain, ALossThatIsNotFiniteEndsTheRunWithACodeOfItsOwn) {
  const Finished run = run_program(
      train({"--schedule", "step", "--step-epochs", "1", "--step-factor", "1e30", "--name", "wild"}), surroundings());
  EXPECT_EQ(run.code, 3);
  EXPECT_THAT(run.out, AllOf(HasSubstr("epoch 1/2  train loss "), Not(HasSubstr("epoch 2/2"))));
  ASSERT_EQ(lines_of(run.err).size(), 1u) << run.err;
  EXPECT_THAT(run.err, ContainsRegex(
                           "^lockstep: error: epoch 2, step [2-9]: the loss of rank 0, 1 is not finite, and the run "
                           "ends; the run is kept in runs/wild\\. Try a smaller --lr than 0\\.2, or --on-nan skip\n$"));
  const Finished eval = run_program({"eval", "runs/wild"}, surroundings());
  char accuracy[40];
  std::snprintf(accuracy, sizeof accuracy, "test acc: %.4f", metrics("wild")[0].test_accuracy);
  EXPECT_THAT(eval.out, HasSubstr(accuracy)) << eval.err;
}

TEST_F(CliTrain, ShowsTheLearningRateAsItIs) {
  const Finished run = run_program(train({"--lr", "0.123456789", "--epochs", "1"}), surroundings());
  EXPECT_THAT(run.out, HasSubstr("\n  learning rate     0.123456789\n"));
}

TEST_F(CliTrain, NamesRunsByTimeAndDevices) {
  ASSERT_EQ(run_program(train({"--epochs", "1"}), surroundings()).code, 0);
  ASSERT_EQ(run_program(train({"--epochs", "1"}), surroundings()).code, 0);
  const auto names = names_of_runs();
  ASSERT_EQ(names.size(), 2u);
  for (const auto& name : names) {
    EXPECT_TRUE(std::regex_match(name, std::regex(R"(\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d_lenet_2xcpu(-2)?)"))) << name;
  }
}

TEST_F(CliTrain, NeverOverwritesARun) {
  ASSERT_EQ(run_program(train({"--name", "first"}), surroundings()).code, 0);
  const std::string before = work_.read("runs/first/metrics.jsonl");
  const Finished second = run_program(train({"--name", "first", "--seed", "1"}), surroundings());
  EXPECT_EQ(second.code, 1);
  EXPECT_THAT(second.err, AllOf(HasSubstr("lockstep: error: "), HasSubstr("runs/first"), HasSubstr("already")));
  EXPECT_EQ(work_.read("runs/first/metrics.jsonl"), before);
}

TEST_F(CliTrain, NeverOverwritesAFile) {
  fs::create_directories(work_ / "runs/mine");
  for (const char* name : {"metrics.jsonl", "model.safetensors", "notes.json", "report.html"}) {
    work_.write(fs::path("runs/mine") / name, "precious");
    const Finished run = run_program(train({"--name", "mine"}), surroundings());
    EXPECT_EQ(run.code, 1);
    EXPECT_THAT(run.err, AllOf(HasSubstr("runs/mine already holds"), HasSubstr(name)));
    EXPECT_EQ(work_.read(fs::path("runs/mine") / name), "precious");
    fs::remove(work_ / "runs/mine" / name);
  }
  work_.write("runs/mine/notes.txt", "of something else");
  EXPECT_EQ(run_program(train({"--name", "mine"}), surroundings()).code, 0);
}

TEST_F(CliTrain, RunsInAnyFolderWithoutAnEnvironment) {
  const auto arguments = train({"--runs-dir", (work_ / "out").string(), "--name", "bare"});
  const Finished run = run_program(arguments, {.folder = "/", .environment = {}});
  ASSERT_EQ(run.code, 0) << run.err;
  for (const char* file : {"config.json", "metrics.jsonl", "model.safetensors"}) {
    EXPECT_TRUE(fs::exists(work_ / "out/bare" / file)) << file;
  }
}

TEST_F(CliTrain, KeepsPathsOfDataThatWorkFromEverywhere) {
  auto from_images = surroundings();
  from_images.folder = images_.path();
  const std::string runs = (work_ / "runs").string();
  const Finished run = run_program(
      {"train", "--data-dir", ".", "--epochs", "1", "--runs-dir", runs, "--name", "r", "--devices", "1"}, from_images);
  ASSERT_EQ(run.code, 0) << run.err;
  const Finished eval = run_program({"eval", "runs/r"}, surroundings());
  EXPECT_EQ(eval.code, 0) << eval.err;
}

TEST_F(CliTrain, EvaluatesARunExactlyOnAnyNumberOfDevices) {
  ASSERT_EQ(run_program(train({"--name", "first", "--epochs", "3", "--batch-size", "16"}), surroundings()).code, 0);
  const double expected = metrics("first").back().test_accuracy;
  char line[100];
  std::snprintf(line, sizeof line, "test acc: %.4f (%.0f of 100 correct), loss ", expected, expected * 100);
  const std::string weights = metrics("first").back().weights;
  std::string loss;
  for (const auto& [spec, list] : std::vector<std::pair<std::string, std::string>>{
           {"1", "[cpu]"}, {"2xcpu", "[cpu, cpu]"}, {"cpu,cpu,cpu", "[cpu, cpu, cpu]"}}) {
    const Finished eval = run_program({"eval", "runs/first", "--devices", spec, "--batch-size", "7"}, surroundings());
    ASSERT_EQ(eval.code, 0) << eval.err;
    EXPECT_THAT(eval.out, AllOf(HasSubstr(line), EndsWith(", weights " + weights + ", on " + list + "\n")));
    const std::string found = eval.out.substr(eval.out.find("loss "), 11);
    EXPECT_EQ(found, loss.empty() ? found : loss);
    loss = found;
  }
}

TEST_F(CliTrain, EvalRefusesWeightsWithAFlippedBit) {
  ASSERT_EQ(run_program(train({"--name", "first", "--epochs", "1"}), surroundings()).code, 0);
  const std::string file = "runs/first/model.safetensors", whole = work_.read(file);
  for (const size_t from_end : {size_t{1}, whole.size() / 2}) {
    std::string bytes = whole;
    bytes[bytes.size() - from_end] ^= 1;
    work_.write(file, bytes);
    const Finished eval = run_program({"eval", "runs/first"}, surroundings());
    EXPECT_EQ(eval.code, 1);
    EXPECT_THAT(eval.out, IsEmpty());
    EXPECT_THAT(eval.err, AllOf(HasSubstr("cannot load '" + file + "': it is damaged"),
                                HasSubstr("take another copy, or train anew")));
  }
  work_.write(file, whole);
  EXPECT_EQ(run_program({"eval", "runs/first"}, surroundings()).code, 0);
}

TEST_F(CliTrain, TheReportsTitleNamesTheDataAndNotTheirFolder) {
  ASSERT_EQ(run_program(train({"--name", "a", "--epochs", "1"}), surroundings()).code, 0);
  EXPECT_THAT(ReportData(work_ / "runs/a/report.html").run()["notes"]["title"].get<std::string>(),
              AllOf(HasSubstr("lenet on fashion-mnist (not the images as published), [cpu, cpu], batch size 32"),
                    Not(HasSubstr(images_.path().string()))));
}

TEST_F(CliTrain, AReportComparesRuns) {
  ASSERT_EQ(run_program(train({"--name", "a", "--epochs", "1"}), surroundings()).code, 0);
  ASSERT_EQ(run_program(train({"--name", "b", "--epochs", "1", "--lr", "0.1"}), surroundings()).code, 0);
  const Finished both = run_program({"report", "runs/b", "runs/a"}, surroundings());
  ASSERT_EQ(both.code, 0) << both.err;
  EXPECT_EQ(both.out, "report.html\n");
  const ReportData report(work_ / "report.html");
  EXPECT_EQ(report.run(0)["name"], "b");
  EXPECT_EQ(report.run(0)["config"]["lr"], 0.1);
  EXPECT_EQ(report.run(1)["metrics"][0]["weights"], metrics("a")[0].weights);
  ASSERT_EQ(run_program({"report", "runs", "--output", "all.html"}, surroundings()).code, 0);
  EXPECT_EQ(ReportData(work_ / "all.html").all()["runs"].size(), 2u);
  const Finished none = run_program({"report", "nowhere"}, surroundings());
  EXPECT_EQ(none.code, 1);
  EXPECT_THAT(none.err, HasSubstr("there is no run in 'nowhere'"));
  EXPECT_EQ(run_program({"report"}, surroundings()).code, 2);
}

TEST_F(CliTrain, MoreRanksThanCoresAreAWarning) {
  const int cores = lockstep::cpu_cores();
  for (const int ranks : {cores, cores + 1}) {
    const Finished run = run_program(
        train({"--devices", std::to_string(ranks) + "xcpu", "--epochs", "1", "--name", std::to_string(ranks)}),
        surroundings());
    EXPECT_EQ(run.code, 0) << run.err;
    EXPECT_EQ(run.err, ranks == cores ? ""
                                      : "lockstep: warning: " + std::to_string(ranks) + " ranks share " +
                                            std::to_string(cores) + (cores == 1 ? " core" : " cores") +
                                            " and wait for each other; fewer are faster: --devices " +
                                            std::to_string(cores) + "xcpu\n");
  }
  const std::string many = std::to_string(cores + 1) + "xcpu";
  const Finished eval = run_program({"eval", "runs/" + std::to_string(cores), "--devices", many}, surroundings());
  auto arguments = train({"--devices", many, "--epochs", "1", "--name", "grid"});
  arguments[0] = "sweep";
  const Finished sweep = run_program(arguments, surroundings());
  for (const Finished& other : {eval, sweep}) {
    EXPECT_EQ(other.code, 0) << other.err;
    EXPECT_THAT(other.err,
                HasSubstr("warning: " + std::to_string(cores + 1) + " ranks share " + std::to_string(cores)));
  }
}

// "0-1", from the line of a status file in /proc.
std::string cores_in(const std::string& status) {
  std::smatch found;
  return std::regex_search(status, found, std::regex("Cpus_allowed_list:\\s*(\\S+)")) ? found[1].str() : "";
}

std::string read_file(const fs::path& file) {
  std::ifstream in(file);
  return {std::istreambuf_iterator<char>(in), {}};
}

// OpenMP binds the thread that loads it to one core, which what starts from there would take over.
TEST_F(CliTrain, RanksAndProcessesHaveAllCoresThoughOpenMpBindsTheMainThread) {
  const std::string all = cores_in(read_file("/proc/self/status"));
  const std::string devices = run_program({"devices"}, surroundings()).out;
  for (const std::string variable : {"OMP_PROC_BIND=true", "OMP_PLACES=threads", "GOMP_CPU_AFFINITY="}) {
    auto around = surroundings();
    around.starts_itself = true;
    around.environment.push_back(variable + (variable.ends_with('=') ? all : ""));
    EXPECT_EQ(run_program({"devices"}, around).out, devices) << variable;
    const auto launched = run_program({"launch", "-n", "1", "cat", "/proc/self/status"}, around);
    EXPECT_EQ(cores_in(launched.out), all) << variable;

    Program job(train({"--epochs", "1000"}), around);
    ASSERT_TRUE(job.wait_for("epoch    2/1000")) << variable;
    int ranks = 0;
    for (const auto& thread : fs::directory_iterator("/proc/" + std::to_string(job.pid()) + "/task")) {
      if (!read_file(thread.path() / "comm").starts_with("rank ")) continue;
      ++ranks;
      EXPECT_EQ(cores_in(read_file(thread.path() / "status")), all) << variable;
    }
    EXPECT_EQ(ranks, 2) << variable;
  }
}

}  // namespace cli_train_test
