// Labels: simulated
// The program lockstep on simulated GPUs: it is told of devices, and the device is preloaded. The exit code is 70
// where the device saw a mistake.
#include <gmock/gmock.h>
#include <lockstep/plan/plan.hpp>

#include "cli/cli_fixture.hpp"

#include <cstdlib>
#include <string>
#include <vector>

namespace cli_on_gpus_test {

using lockstep::EpochMetrics;
using lockstep::Finished;
using lockstep::Surroundings;
using testing::AllOf;
using testing::HasSubstr;

class CliOnGpus : public lockstep::Cli {
 protected:
  // On GPUs or without. Nothing is found to draw curves with, which takes longer than all the rest.
  Finished run(const std::vector<std::string>& arguments, bool on_gpus = true) const {
    Surroundings around{.folder = work_.path(), .environment = {"PATH=", "LC_ALL=C.UTF-8"}};
    if (on_gpus) around.environment.push_back(std::string("LD_PRELOAD=") + std::getenv("LOCKSTEP_SIMULATED_DEVICE"));
    Finished finished = run_program(arguments, around);
    EXPECT_EQ(finished.code, 0) << finished.out << finished.err;
    return finished;
  }

  std::vector<std::string> train_mlp(const std::vector<std::string>& more) const {
    std::vector<std::string> words = train({"--model", "mlp", "--width", "0.25"});
    words.insert(words.end(), more.begin(), more.end());
    return words;
  }

  // Trains `flags` on CPU ranks and on GPUs, and compares.
  void expect_as_on_the_cpu(const std::string& name, std::vector<std::string> flags, const std::string& devices) const {
    SCOPED_TRACE(name);
    flags.insert(flags.end(), {"--name", name + "-cpu"});
    run(train_mlp(flags), /*on_gpus=*/false);
    flags.back() = name;
    flags.insert(flags.end(), {"--devices", devices});
    run(train_mlp(flags));
    expect_near(metrics(name), metrics(name + "-cpu"));
  }

  static void expect_near(const std::vector<EpochMetrics>& found, const std::vector<EpochMetrics>& expected) {
    ASSERT_EQ(found.size(), expected.size());
    for (size_t i = 0; i < found.size(); ++i) {
      EXPECT_NEAR(found[i].train_loss, expected[i].train_loss, 1e-4) << "epoch " << i + 1;
      EXPECT_NEAR(found[i].test_accuracy, expected[i].test_accuracy, 0.021) << "epoch " << i + 1;
    }
  }
};

TEST_F(CliOnGpus, ListsThem) {
  EXPECT_THAT(run({"devices"}).out, AllOf(HasSubstr("cuda:0      GPU, 1.1 GB of 1.1 GB free"), HasSubstr("cuda:3")));
}

TEST_F(CliOnGpus, TrainsGoesOnAndEvaluates) {
  expect_as_on_the_cpu("data", {}, "cuda:0,cuda:1");
  const Finished resumed = run({"train", "--resume", "runs/data", "--epochs", "3", "--devices", "2xcuda:0"});
  EXPECT_THAT(resumed.out, AllOf(HasSubstr("goes on from"), HasSubstr("on [cuda:0, cuda:0]")));
  run({"train", "--resume", "runs/data-cpu", "--epochs", "3"}, /*on_gpus=*/false);
  expect_near(metrics("data"), metrics("data-cpu"));
  const auto score = [&](const std::string& devices, bool on_gpus) {
    const std::string said = run({"eval", "runs/data", "--devices", devices}, on_gpus).out;
    return said.substr(0, said.find(", on ["));
  };
  EXPECT_EQ(score("cuda:0,cuda:1", true), score("2xcpu", false));
}

TEST_F(CliOnGpus, ShardsTheGradients) {
  expect_as_on_the_cpu("zero", {"--zero-stage", "2", "--optimizer", "adamw", "--lr", "0.001"}, "cuda:0,cuda:1");
}

TEST_F(CliOnGpus, PlansAndTrainsAPipeline) {
  EXPECT_THAT(run({"plan", "--model", "mlp", "--width", "0.25", "--devices", "cuda:0,cuda:1", "--batch-size", "32",
                   "--seconds", "0.05", "--out", "plan.json"})
                  .out,
              HasSubstr("kept in plan.json"));
  lockstep::Plan plan = lockstep::read_plan(work_ / "plan.json");
  plan.split = {.mesh = {.pipeline = 2}, .microbatches = 3, .cuts = {5}};
  work_.write("pipeline.json", to_json(plan));
  expect_as_on_the_cpu("pipeline", {"--plan", "pipeline.json"}, "cuda:0,cuda:1");
}

}  // namespace cli_on_gpus_test
