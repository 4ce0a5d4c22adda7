// Labels: program long
// Wrong input and outputs that fail: an exit code, one clear text, and nothing left behind.
#include <lockstep/models/models.hpp>
#include <lockstep/plan/plan.hpp>

#include "cli_fixture.hpp"

namespace cli_errors_test {

namespace fs = std::filesystem;
using lockstep::Cli;
using lockstep::Finished;
using lockstep::lines_of;
using lockstep::Program;
using lockstep::run_program;
using testing::AllOf;
using testing::ContainsRegex;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;
using testing::StartsWith;

class CliErrors : public Cli {
 protected:
  // Runs `arguments` and expects the error on one line, and no trace of a run.
  void expect_error(const std::vector<std::string>& arguments, int code, const std::vector<std::string>& parts) {
    const Finished run = run_program(arguments, surroundings());
    SCOPED_TRACE(testing::PrintToString(arguments) + ": " + run.err);
    EXPECT_EQ(run.code, code);
    EXPECT_THAT(run.err, StartsWith(code == 1 ? "lockstep: error: " : "lockstep: "));
    EXPECT_EQ(lines_of(run.err).size(), code == 1 ? 1u : 2u);
    for (const auto& part : parts) EXPECT_THAT(run.err, HasSubstr(part));
    EXPECT_THAT(work_.names(), IsEmpty());
  }
};

TEST_F(CliErrors, WrongSettings) {
  expect_error(train({"--batch-size", "0"}), 2, {"--batch-size: 0 is too small; it must be at least 1"});
  expect_error(train({"--batch-size", "-1"}), 2, {"--batch-size: -1 is too small; it must be at least 1"});
  expect_error(train({"--batch-size", "301"}), 1, {"batch size", "301", "at most 300"});
  expect_error(train({"--lr", "-0.1"}), 2, {"--lr: -0.1 is too small; it must be at least 0"});
  for (const char* text : {"nan", "much", "0.1x"}) {
    expect_error(train({"--lr", text}), 2, {"--lr: " + std::string(text) + " is not a number"});
  }
  for (const char* count : {"0", "-1", "0xcpu"}) {
    expect_error(train({"--devices", count}), 2,
                 {"devices \"" + std::string(count) + "\": a run needs at least one device"});
  }
  expect_error(train({"--epochs", "0"}), 2, {"--epochs: 0 is too small; it must be at least 1"});
  for (const char* seconds : {"0", "-1"}) {
    expect_error(train({"--timeout", seconds}), 2, {"--timeout: " + std::string(seconds) + " is too small"});
    expect_error(train({"--silence", seconds}), 2, {"--silence: " + std::string(seconds) + " is too small"});
  }
  expect_error(train({"--threads-per-rank", "0"}), 2, {"--threads-per-rank: 0 is too small"});
  expect_error(train({"--threads-per-rank", "100000"}), 2, {"100000 is too large; it must be at most 1024"});
  for (const char* text : {"1e308", "1e999", "inf"}) {
    expect_error(train({"--lr", text}), 2, {"--lr: " + std::string(text) + " is too large", "3.4e38"});
  }
  expect_error(
      train({"--model", "resnet"}), 2,
      {"--model: there is no model \"resnet\", but lenet, mlp, alexnet, resnet18, gpt; did you mean resnet18?"});
  expect_error(train({"--width", "0.5"}), 2, {"lenet has no --width; it is of mlp, alexnet, resnet18"});
  expect_error(train({"--model", "mlp", "--width", "0"}), 2, {"mlp: the width is 0; it must be above 0"});
  expect_error(train({"--model", "mlp", "--width", "wide"}), 2, {"--width: wide is not a number"});
  expect_error(train({"--model", "resnet18", "--image-size", "8"}), 2, {"image size is 8; it must be from 9"});
  expect_error(train({"--model", "resnet18", "--image-size", "0"}), 2, {"--image-size: 0 is too small"});
  expect_error(train({"--model", "alexnet", "--groups", "3"}), 2, {"groups is 3; it must be 1, or 2"});
  expect_error(train({"--data", "mnist"}), 2, {"mnist", "fashion-mnist", "synthetic"});
  expect_error(train({"--data", "synthetic"}), 2, {"--data-dir and --data synthetic do not go together"});
  expect_error(train({"--keep-last", "0", "--checkpoint-every", "5"}), 2,
               {"--checkpoint-every and --keep-last 0 do not go together"});
  expect_error(train({"--check-arithmetic", "0.5"}), 2,
               {"--check-arithmetic and no --grain do not go together", "give a --grain, such as 32"});
  expect_error(train({"--progress", "dots"}), 2, {"--progress", "dots", "lines"});
  for (const char* name : {"", ".", "..", ".lock", "a/b"}) expect_error(train({"--name", name}), 2, {"--name", name});
  for (const char* name : {"a\nb", "\x1b[31m", "\x7f"}) {
    expect_error(train({"--name", name}), 2, {"--name", "control characters"});
  }
}

TEST_F(CliErrors, EmptyTextsAreNotTheDefault) {
  for (const char* flag : {"--data-dir", "--config", "--runs-dir", "--batch-size", "--seed", "--trace", "--resume"}) {
    expect_error(train({flag, ""}), 2, {flag});
  }
  for (const char* flag : {"--dir", "--url"}) expect_error({"fetch-data", flag, ""}, 2, {flag, "empty"});
  expect_error({"eval", ""}, 2, {"RUN_DIR", "empty"});
  expect_error({"eval", "run", "--data-dir", ""}, 2, {"--data-dir", "empty"});
  expect_error({"eval", "run", "--devices", ""}, 2, {"devices", "empty"});
}

TEST_F(CliErrors, NumbersThatAreTooLarge) {
  for (const auto& [flag, number] :
       std::vector<std::pair<std::string, std::string>>{{"--seed", "18446744073709551616"},
                                                        {"--batch-size", "99999999999999999999"},
                                                        {"--batch-size", "9223372036854775808"},
                                                        {"--epochs", "2147483648"},
                                                        {"--threads-per-rank", "99999999999"}}) {
    expect_error(train({flag, number}), 2, {flag, number, "too large"});
  }
  expect_error({"eval", "run", "--batch-size", "99999999999999999999"}, 2, {"--batch-size", "too large"});
  expect_error(train({"--epochs", "1.5"}), 2, {"--epochs", "1.5"});
}

TEST_F(CliErrors, DevicesThatAreNotThere) {
  expect_error(train({"--devices", "tpu"}), 2, {"tpu"});
  expect_error(train({"--devices", ""}), 2, {"devices", "empty"});
  expect_error(train({"--devices", "cuda:99"}), 2, {"cuda:99", "GPU"});
  expect_error(train({"--precision", "tf32"}), 2, {"--precision tf32 and --devices without CUDA do not go together"});
  expect_error(train({"--cuda-graph"}), 2, {"--cuda-graph and --devices without CUDA do not go together"});
}

TEST_F(CliErrors, NamesThatItDoesNotKnow) {
  expect_error(train({"--precision", "fp8"}), 2, {"\"fp8\"", "float32, tf32 or bf16"});
  expect_error(train({"--memory-format", "nhwc"}), 2, {"\"nhwc\"", "auto, contiguous or channels-last"});
}

TEST_F(CliErrors, DataThatCannotBeRead) {
  expect_error({"train", "--data-dir", work_.path().string()}, 1, {work_.path().string()});
  expect_error({"train", "--data-dir", "missing"}, 1, {(work_ / "missing").string()});
  expect_error({"train", "--data-dir", "/etc/passwd"}, 1, {"/etc/passwd", "not a folder"});
  expect_error({"train", "--model", "gpt", "--text", "/dev/zero"}, 1, {"/dev/zero", "no regular file"});
  images_.write("t10k-labels-idx1-ubyte", "not IDX");
  expect_error(train(), 1, {(images_ / "t10k-labels-idx1-ubyte").string()});
}

TEST_F(CliErrors, FoldersThatCannotBeWritten) {
  // Also root cannot make a folder inside a file or in /proc.
  images_.write("file", "");
  const std::string file = (images_ / "file").string();
  expect_error(train({"--runs-dir", file, "--name", "r"}), 1, {file, "Not a directory"});
  expect_error(train({"--runs-dir", "/proc/nowhere"}), 1, {"/proc/nowhere"});
  // Root may not even look at this. (For others a folder without permission is such a place.)
  fs::create_directory_symlink("loop", images_ / "loop");
  const std::string loop = (images_ / "loop").string();
  expect_error(train({"--runs-dir", loop, "--name", "r"}), 1, {loop, "Too many levels of symbolic links"});
  expect_error(train({"--runs-dir", loop}), 1, {loop, "Too many levels of symbolic links"});
  const std::string long_name(300, 'n');
  expect_error(train({"--name", long_name}), 1, {long_name, "File name too long"});
  expect_error(train({"--name", "\xff"}), 1, {"runs/\xff", "UTF-8"});
}

TEST_F(CliErrors, ConfigurationsThatMakeNoSense) {
  expect_error({"train", "--config", "missing.json"}, 1, {"missing.json", "No such file"});
  expect_error({"train", "--config", images_.path().string()}, 1, {images_.path().string()});
  const std::string file = (images_ / "config.json").string();
  for (const auto& [text, part] : std::vector<std::pair<std::string, std::string>>{
           {"", "empty"},
           {"{", "not JSON: it goes wrong at line 1, column 2"},
           {"{\"epochs\": 0}", "epochs is 0"},
           {"{\"model\": \"vgg\"}", "there are lenet, mlp, alexnet, resnet18"},
           {"{\"colour\": 1}", "colour"}}) {
    images_.write("config.json", text);
    expect_error({"train", "--config", file}, 1, {file, part});
  }
}

TEST_F(CliErrors, PlansThatDoNotFit) {
  lockstep::Plan plan{.model = "mlp",
                      .options = "width 0.25",
                      .layers = lockstep::model_signature(lockstep::make_model({.name = "mlp", .width = 0.25})),
                      .devices = "cpu,cpu",
                      .batch_size = 32,
                      .split = {.mesh = {.pipeline = 2}, .cuts = {4}}};
  const std::string file = (images_ / "plan.json").string();
  const auto expect_refused = [&](const std::vector<std::string>& model, const std::vector<std::string>& parts) {
    images_.write("plan.json", to_json(plan));
    std::vector<std::string> words = {"train", "--data-dir", images_.path().string(), "--plan", file};
    words.insert(words.end(), model.begin(), model.end());
    expect_error(words, 1, parts);
  };
  const std::vector<std::string> mlp = {"--model", "mlp", "--width", "0.25"};
  expect_error(train({"--plan", "missing.json"}), 1, {"--plan", "missing.json", "No such file"});
  expect_error(train({"--plan", ""}), 2, {"--plan"});
  expect_refused({}, {file, "for \"mlp\" (width 0.25)", "this run is of lenet"});
  expect_refused({"--model", "mlp"}, {file, "[128, 784]", "[512, 784]"});
  expect_refused({"--model", "mlp", "--width", "0.25", "--devices", "3xcpu"},
                 {file, "1 x 2 x 1 (data x pipeline x tensor) does not fit 3 devices", "Use the devices"});
  plan.devices = "cuda:70,cuda:71";
  expect_refused(mlp, {file, "cuda:70", "--devices"});
  plan.devices = "cpu,cpu";
  plan.split.cuts = {20};
  expect_refused(mlp, {file, "[20]"});
  plan.split.cuts = {4};
  plan.batch_size = 301;
  expect_refused(mlp, {"batch size", "301", "at most 300"});
  images_.write("plan.json", R"({"model": "mlp"})");
  expect_error(train({"--plan", file}), 1, {file, "\"options\" is missing"});
}

TEST_F(CliErrors, AFolderOfARunThatWasKilledSaysSo) {
  fs::create_directories(work_ / "runs/killed");
  work_.write("runs/killed/config.json", "{}");
  const Finished run = run_program(train({"--name", "killed"}), surroundings());
  EXPECT_EQ(run.code, 1);
  EXPECT_THAT(run.err, AllOf(HasSubstr("runs/killed already holds a run's config.json, but no finished epoch"),
                             HasSubstr("remove the folder")));
}

TEST_F(CliErrors, FoldersThatHoldNoRun) {
  expect_error({"eval", "missing"}, 1, {"missing", "config.json"});
  expect_error({"eval", images_.path().string()}, 1, {images_.path().string(), "config.json"});
  images_.write("config.json", "{\"data_dir\": \"" + images_.path().string() + "\"}");
  expect_error({"eval", images_.path().string()}, 1, {"model.safetensors"});
  expect_error({"eval", images_.path().string(), "--batch-size", "0"}, 2, {"--batch-size"});
  images_.write("config.json", "{\"data\": \"synthetic\"}");
  expect_error({"eval", images_.path().string(), "--data-dir", "somewhere"}, 1, {"--data-dir", "synthetic"});
  expect_error({"eval", images_.path().string(), "--text", "somewhere"}, 1, {"--text", "synthetic"});
  expect_error({"eval", "run", "--data-dir", "here", "--text", "there"}, 2, {"--data-dir", "--text"});
}

// Each command below fails for another reason: the data are missing.
TEST_F(CliErrors, AFlagResetsWhatOnlyWentWithTheConfigurationsChoice) {
  images_.write("c.json", R"({"checkpoint_every": 10, "data_dir": "here"})");
  const std::string config = (images_ / "c.json").string();
  expect_error({"train", "--config", config, "--keep-last", "0", "--data-dir", "missing"}, 1, {"missing"});
  expect_error({"train", "--config", config, "--model", "gpt", "--text", "no-text"}, 1, {"no-text"});
  images_.write("c.json", R"({"model": "gpt", "text": "here"})");
  expect_error({"train", "--config", config, "--model", "lenet", "--data-dir", "missing"}, 1, {"missing"});
}

TEST_F(CliErrors, AConfigurationThatCannotBeReadSaysWhy) {
  fs::create_directory(images_ / "config.json");
  expect_error({"eval", images_.path().string()}, 1, {"config.json", "Is a directory"});
  fs::remove(images_ / "config.json");
  fs::create_symlink("config.json", images_ / "config.json");
  expect_error({"eval", images_.path().string()}, 1, {"config.json", "Too many levels of symbolic links"});
}

TEST_F(CliErrors, WrongUsage) {
  expect_error({"train", "--batch-size", "many"}, 2, {"--batch-size", "many", "lockstep train --help"});
  expect_error({"train", "--batch-size"}, 2, {"--batch-size"});
  expect_error({"train", "--seed", "-1"}, 2, {"--seed", "-1"});
  expect_error({"train", "--epochs", "99999999999"}, 2, {"--epochs", "99999999999"});
  expect_error({"train", "--turbo", "9"}, 2, {"lockstep: train has no option --turbo\n"});
  expect_error({"train", "--epoch", "3"}, 2, {"train has no option --epoch; did you mean --epochs?"});
  expect_error({"train", "--batchsize=3"}, 2, {"train has no option --batchsize; did you mean --batch-size?"});
  expect_error({"train", "extra"}, 2, {"train does not expect \"extra\""});
  expect_error({"trian"}, 2, {"lockstep has no command trian; did you mean train?", "lockstep --help"});
  expect_error({"help", "nope"}, 2, {"lockstep has no command nope"});
  expect_error({"nope", "--help"}, 2, {"lockstep has no command nope"});
  expect_error({"--version", "extra"}, 2, {"lockstep has no command extra"});
  expect_error({"walk"}, 2, {"lockstep has no command walk; there are train, eval"});
  expect_error({"eval"}, 2, {"RUN_DIR", "lockstep eval --help"});
}

TEST_F(CliErrors, HelpShowsDefaultsAndExamples) {
  const Finished alone = run_program({}, surroundings());
  EXPECT_EQ(alone.code, 0);
  EXPECT_THAT(alone.out, AllOf(HasSubstr("train"), HasSubstr("eval"), HasSubstr("devices"), HasSubstr("fetch-data"),
                               HasSubstr("Examples:"), HasSubstr("Exit codes:")));
  EXPECT_EQ(run_program({"--help"}, surroundings()).out, alone.out);
  EXPECT_EQ(run_program({"help"}, surroundings()).out, alone.out);
  EXPECT_EQ(run_program({"help", "eval"}, surroundings()).out, run_program({"eval", "--help"}, surroundings()).out);
  for (const std::string command : {"train", "eval", "sweep", "devices", "fetch-data", "plan", "launch"}) {
    const std::string usage = "Usage: lockstep " + command;
    const Finished help = run_program({command, "--help"}, surroundings());
    EXPECT_EQ(help.code, 0);
    EXPECT_THAT(help.out, AllOf(HasSubstr(usage), HasSubstr("Examples:")));
    for (const auto& line : lines_of(help.out)) EXPECT_LE(line.size(), 80u) << line;
  }
  EXPECT_THAT(run_program({"train", "--help-all"}, surroundings()).out,
              AllOf(HasSubstr("--batch-size N"), HasSubstr("(default: 1)"), HasSubstr("(default: 0.2 for sgd")));
  EXPECT_THAT(run_program({"--version"}, surroundings()).out, StartsWith("lockstep "));
}

// --help shows the flags to begin with, --help-all all of them.
TEST_F(CliErrors, HelpOfTrainBeginsWithFewFlags) {
  const auto flags_in = [&](const char* help) {
    std::vector<std::string> flags;
    const Finished run = run_program({"train", help}, surroundings());
    EXPECT_EQ(run.code, 0);
    EXPECT_THAT(run.out, HasSubstr("  lockstep train --devices 2 --batch-size 512"));
    for (const auto& line : lines_of(run.out)) {
      EXPECT_LE(line.size(), 80u) << line;
      const size_t flag = line.find("--");
      if (line.starts_with("  -") && flag != line.npos) flags.push_back(line.substr(flag, line.find(' ', flag) - flag));
    }
    return flags;
  };
  const auto first = flags_in("--help"), all = flags_in("--help-all");
  EXPECT_THAT(first, testing::IsSupersetOf({"--devices", "--model", "--batch-size", "--lr", "--epochs", "--help-all"}));
  EXPECT_LE(first.size(), 12u);
  EXPECT_GT(all.size(), 45u);
  EXPECT_THAT(all, testing::IsSupersetOf(first));
  EXPECT_THAT(all, testing::Contains("--outer-momentum"));
  const std::string begin = run_program({"help", "train"}, surroundings()).out;
  EXPECT_THAT(begin, HasSubstr("lockstep train --help-all shows all flags"));
  EXPECT_LE(lines_of(begin).size(), 40u);
}

TEST_F(CliErrors, DevicesAreListed) {
  const Finished run = run_program({"devices"}, surroundings());
  EXPECT_EQ(run.code, 0) << run.err;
  EXPECT_THAT(run.out, AllOf(ContainsRegex("CPU cores  +[0-9]+.*\n"), HasSubstr("default "), HasSubstr("LibTorch "),
                             HasSubstr("NCCL")));
}

TEST_F(CliErrors, AReaderThatGoesAwayEndsTheRunQuietly) {
  Program program(train({"--epochs", "100000", "--name", "piped"}), surroundings());
  ASSERT_TRUE(program.wait_for("epoch      2/100000"));
  program.close_output();
  const Finished run = program.finish();
  EXPECT_EQ(run.code, 128 + SIGPIPE);
  EXPECT_THAT(run.err, AllOf(HasSubstr("stopped after "), HasSubstr("runs/piped"), Not(HasSubstr("error"))));
  EXPECT_GE(metrics("piped").size(), 2u);
}

TEST_F(CliErrors, AFullDiskUnderTheOutputIsNamed) {
  auto full = surroundings();
  full.out = "/dev/full";
  for (const auto& arguments : {train({"--epochs", "100000"}), {"devices"}, {"--help"}}) {
    const Finished run = run_program(arguments, full);
    EXPECT_EQ(run.code, 1);
    EXPECT_THAT(run.err, HasSubstr("lockstep: error: cannot write to the standard output: No space left on device"));
  }
}

}  // namespace cli_errors_test
