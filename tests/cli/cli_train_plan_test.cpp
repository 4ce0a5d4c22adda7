// Labels: long
// lockstep train with a plan: it splits the network as the plan's file says, or makes a plan first.
#include <lockstep/models/models.hpp>
#include <lockstep/plan/plan.hpp>

#include "cli_fixture.hpp"

namespace cli_train_plan_test {

using lockstep::Cli;
using lockstep::Finished;
using lockstep::run_program;
using testing::AllOf;
using testing::ContainsRegex;
using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;

// Plans for a small MLP.
class CliTrainPlan : public Cli {
 protected:
  static lockstep::Plan plan_with(const lockstep::ModelSplit& split) {
    const auto layers = lockstep::model_signature(lockstep::make_model({.name = "mlp", .width = 0.25}));
    return {.model = "mlp",
            .options = "width 0.25",
            .layers = layers,
            .devices = "cpu,cpu",
            .batch_size = 48,
            .split = split};
  }

  // `lockstep train` of that network as `plan` says, without the flags that a plan stands for.
  std::vector<std::string> train(const std::vector<std::string>& more) const {
    std::vector<std::string> words = {
        "train", "--model", "mlp",      "--width", "0.25", "--data-dir", images_.path().string(),
        "--lr",  "0.05",    "--epochs", "2"};
    words.insert(words.end(), more.begin(), more.end());
    return words;
  }
};

TEST_F(CliTrainPlan, SplitsTheNetworkAsItsFileSays) {
  const Finished made = run_program({"plan", "--model", "mlp", "--width", "0.25", "--devices", "2xcpu", "--batch-size",
                                     "48", "--seconds", "0.05", "--out", "best.json"},
                                    surroundings());
  ASSERT_EQ(made.code, 0) << made.err;
  lockstep::Plan plan = lockstep::read_plan(work_ / "best.json");
  const Finished best = run_program(train({"--plan", "best.json", "--name", "best"}), surroundings());
  ASSERT_EQ(best.code, 0) << best.err;
  EXPECT_THAT(best.out, AllOf(HasSubstr("\n  devices           [cpu, cpu], 2 ranks\n"),
                              HasSubstr("\n  split             " + to_string(plan.split) + "\n"),
                              HasSubstr("\n  batch size        48 over all ranks\n")));

  plan.split = {.mesh = {.pipeline = 2}, .microbatches = 3, .cuts = {5}};
  work_.write("pipeline.json", to_json(plan));
  const Finished run =
      run_program(train({"--plan", "pipeline.json", "--batch-size", "50", "--name", "first"}), surroundings());
  ASSERT_EQ(run.code, 0) << run.err;
  EXPECT_EQ(run.err, "");
  EXPECT_THAT(run.out, AllOf(HasSubstr("\n  split             1 x 2 x 1 (data x pipeline x tensor), 1f1b, "
                                       "3 microbatches, cut at 5\n"),
                             HasSubstr("\n  batch size        50 "), HasSubstr("\nepoch 2/2 ")));
  const Finished eval = run_program({"eval", "runs/first", "--devices", "3xcpu"}, surroundings());
  ASSERT_EQ(eval.code, 0) << eval.err;
  char accuracy[40];
  std::snprintf(accuracy, sizeof accuracy, "test acc: %.4f ", metrics("first")[1].test_accuracy);
  EXPECT_THAT(eval.out, StartsWith(accuracy));
}

TEST_F(CliTrainPlan, GivesUpItsMicrobatchesForGrains) {
  const auto plan = plan_with({.mesh = {.pipeline = 2}, .microbatches = 3, .cuts = {5}});
  work_.write("plan.json", to_json(plan));
  const Finished run = run_program(train({"--plan", "plan.json", "--grain", "16", "--name", "first"}), surroundings());
  ASSERT_EQ(run.code, 0) << run.err;
  EXPECT_THAT(run.out, HasSubstr("\n  split             1 x 2 x 1 (data x pipeline x tensor), 1f1b, cut at 5\n"));
}

TEST_F(CliTrainPlan, IsKeptInTheConfigurationUntilAnotherIsNamed) {
  work_.write("plan.json", to_json(plan_with({.mesh = {.tensor = 2}})));
  ASSERT_EQ(run_program(train({"--plan", "plan.json", "--name", "first"}), surroundings()).code, 0);
  const std::vector<std::string> again = {"train", "--config", "runs/first/config.json"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.begin(), again.begin(), again.end());
    return run_program(more, surroundings());
  };
  const Finished same = with({"--name", "same"});
  ASSERT_EQ(same.code, 0) << same.err;
  EXPECT_THAT(same.out, HasSubstr("  split             1 x 1 x 2 (data x pipeline x tensor)\n"));
  EXPECT_EQ(work_.read("runs/same/model.safetensors"), work_.read("runs/first/model.safetensors"));

  const Finished fewer = with({"--devices", "cpu", "--name", "fewer"});
  EXPECT_EQ(fewer.code, 2);
  EXPECT_THAT(fewer.err,
              AllOf(HasSubstr("1 x 1 x 2 (data x pipeline x tensor) does not fit 1 device"), HasSubstr("--plan none")));
  const Finished none = with({"--devices", "cpu", "--plan", "none", "--name", "none"});
  ASSERT_EQ(none.code, 0) << none.err;
  EXPECT_THAT(none.out, Not(HasSubstr("  split")));
}

TEST_F(CliTrainPlan, ForImagesOfAnotherSizeIsRefused) {
  const auto layers =
      lockstep::model_signature(lockstep::make_model({.name = "resnet18", .width = 0.05, .image_size = 16}));
  const lockstep::Plan plan{.model = "resnet18",
                            .options = "width 0.05, images of 16 x 16",
                            .layers = layers,
                            .batch_size = 32,
                            .split = {.mesh = {.pipeline = 2}, .cuts = {4}}};
  work_.write("plan.json", to_json(plan));
  const Finished run = run_program(
      {"train", "--model", "resnet18", "--width", "0.05", "--image-size", "9", "--plan", "plan.json"}, surroundings());
  EXPECT_EQ(run.code, 1);
  EXPECT_THAT(run.err, AllOf(HasSubstr("for \"resnet18\" (width 0.05, images of 16 x 16)"), HasSubstr("to [9, 9]"),
                             HasSubstr("this run is of resnet18, width 0.05, images of 9 x 9")));
}

TEST_F(CliTrainPlan, IsMadeFirstIfAskedFor) {
  const Finished run =
      run_program(train({"--plan", "auto", "--devices", "2xcpu", "--batch-size", "32", "--grain", "8", "--name", "a"}),
                  surroundings());
  ASSERT_EQ(run.code, 0) << run.err;
  EXPECT_THAT(run.out, Not(HasSubstr("microbatches")));  // grains are those
  EXPECT_THAT(run.out, ContainsRegex("^plan: ([12] x [12] x 1 [^;]+); predicted: [0-9.]+ ms per step, [0-9.]+ "
                                     "times as fast as one device( [(]which would be faster alone[)])?\nlockstep "));
  const std::string choice = run.out.substr(6, run.out.find(';') - 6);
  EXPECT_THAT(run.out, HasSubstr("\n  split             " + choice + "\n"));
  EXPECT_EQ(metrics("a").size(), 2u);
}

}  // namespace cli_train_plan_test
