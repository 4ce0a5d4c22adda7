// Labels: program
// The flags of lockstep train for larger batches and the optimizer: what is shown, kept and run again; what is refused;
// and momenta that end as 0.
#include <lockstep/nn/tensor_files.hpp>

#include "cli_fixture.hpp"

#include <limits>

namespace cli_update_test {

using lockstep::Cli;
using lockstep::Finished;
using lockstep::lines_of;
using lockstep::run_program;
using testing::AllOf;
using testing::HasSubstr;
using testing::IsEmpty;

class CliUpdate : public Cli {
 protected:
  void expect_refused(const std::vector<std::string>& flags, const std::vector<std::string>& parts) {
    const Finished run = run_program(train(flags), surroundings());
    SCOPED_TRACE(testing::PrintToString(flags) + ": " + run.err);
    EXPECT_EQ(run.code, 2);
    EXPECT_EQ(lines_of(run.err).size(), 2u);
    for (const auto& part : parts) EXPECT_THAT(run.err, HasSubstr(part));
    EXPECT_THAT(work_.names(), IsEmpty());
  }
};

TEST_F(CliUpdate, ShowsKeepsAndRepeatsALargerBatch) {
  const Finished run =
      run_program(train({"--name",     "first", "--scale-batch",  "4",     "--accumulate", "2", "--optimizer", "lars",
                         "--momentum", "0.9",   "--weight-decay", "5e-4",  "--lr",         "2", "--scale-lr",  "linear",
                         "--warmup",   "1",     "--schedule",     "cosine"}),
                  surroundings());
  ASSERT_EQ(run.code, 0) << run.err;
  EXPECT_THAT(
      run.out,
      AllOf(HasSubstr("\n  batch size        128 over all ranks, 4 times 32, in 2 parts\n"),
            HasSubstr("\n  optimizer         lars, momentum 0.9, weight decay 5e-04\n"),
            HasSubstr("\n  learning rate     2, linear for 128 / 32 samples = 8, from 2 over 1 epoch of warm-up, "
                      "cosine\n")));
  EXPECT_DOUBLE_EQ(metrics("first")[0].lr, 2 + 6 * 2.0 / 3);  // the last of three steps
  const Finished again =
      run_program({"train", "--config", "runs/first/config.json", "--name", "again"}, surroundings());
  ASSERT_EQ(again.code, 0) << again.err;
  EXPECT_EQ(work_.read("runs/again/model.safetensors"), work_.read("runs/first/model.safetensors"));

  const Finished other = run_program({"train", "--config", "runs/first/config.json", "--name", "other", "--schedule",
                                      "step", "--step-epochs", "1", "--step-factor", "0.5", "--scale-lr", "sqrt"},
                                     surroundings());
  ASSERT_EQ(other.code, 0) << other.err;
  EXPECT_EQ(metrics("other")[1].lr, 2);
  const Finished back = run_program(
      {"train", "--config", "runs/other/config.json", "--name", "back", "--schedule", "constant"}, surroundings());
  ASSERT_EQ(back.code, 0) << back.err;
  EXPECT_EQ(metrics("back")[1].lr, 4);

  // The rate was for another optimizer.
  const Finished adam = run_program(
      {"train", "--config", "runs/first/config.json", "--name", "adam", "--optimizer", "adam", "--momentum", "0"},
      surroundings());
  ASSERT_EQ(adam.code, 0) << adam.err;
  EXPECT_THAT(adam.out, HasSubstr("\n  learning rate     0.001, linear for 128 / 32 samples = 0.004"));
}

TEST_F(CliUpdate, FlagsOverrideARecipe) {  // train() gives --batch-size and --epochs
  const Finished run = run_program(train({"--recipe", "fast", "--name", "fast", "--lr", "0.01"}), surroundings());
  ASSERT_EQ(run.code, 0) << run.err;
  EXPECT_THAT(run.out,
              AllOf(HasSubstr("\n  batch size        32 over all ranks\n"), HasSubstr("\n  optimizer         adam\n"),
                    HasSubstr("\n  learning rate     0.01, from 1e-05 over 0.1 epochs of warm-up, cosine\n"),
                    HasSubstr("\n  epochs            2\n")));
}

// At this rate units die within some steps. The momentum of a dead one is multiplied by 0.6 per step. It would become
// denormal after some 180 steps and stay so (docs/decisions/0085).
TEST_F(CliUpdate, MomentaAreNeverDenormal) {
  const Finished run =
      run_program({"train", "--data", "synthetic", "--model", "mlp", "--width", "0.05", "--epochs", "1", "--batch-size",
                   "256", "--lr", "1", "--momentum", "0.6", "--devices", "2xcpu", "--name", "first"},
                  surroundings());
  ASSERT_EQ(run.code, 0) << run.err;
  const auto tensors = lockstep::load_tensors(work_ / "runs/first/checkpoints/epoch-0001.safetensors");
  for (const auto& [name, tensor] : tensors) {
    const at::Tensor magnitude = tensor.abs();
    EXPECT_FALSE(at::logical_and(magnitude > 0, magnitude < std::numeric_limits<float>::min()).any().item<bool>())
        << name;
  }
  EXPECT_TRUE((tensors.at("optimizer.momentum_buffer.fc2.bias") == 0).any().item<bool>()) << "no unit died";
}

TEST_F(CliUpdate, ShowsAndKeepsUnequalParts) {
  const Finished run = run_program(train({"--name", "first", "--balance", "3,1"}), surroundings());
  ASSERT_EQ(run.code, 0) << run.err;
  EXPECT_THAT(run.out, AllOf(HasSubstr("\n  parts             in shares of 3,1\n"),
                             HasSubstr(" sec/epoch  parts 24 + 8\n"), HasSubstr("\nparts of a batch: 24 + 8\n")));
  EXPECT_THAT(metrics("first")[1].parts, testing::ElementsAre(24, 8));
  const Finished again = run_program(
      {"train", "--config", "runs/first/config.json", "--name", "again", "--balance", "auto"}, surroundings());
  ASSERT_EQ(again.code, 0) << again.err;
  EXPECT_THAT(again.out, HasSubstr("\n  parts             in proportion to measured speed\n"));
  EXPECT_EQ(metrics("again")[1].parts.size(), 2u);
}

TEST_F(CliUpdate, ShowsAndKeepsAGrain) {
  const Finished run = run_program(train({"--name", "first", "--grain", "16"}), surroundings());
  ASSERT_EQ(run.code, 0) << run.err;
  EXPECT_THAT(run.out, HasSubstr("\n  grain             16\n"));
  EXPECT_EQ(run.err, "");
  const Finished eval =
      run_program({"eval", "runs/first", "--devices", "cpu", "--threads-per-rank", "2"}, surroundings());
  EXPECT_EQ(eval.code, 1);
  EXPECT_THAT(eval.err, HasSubstr("--grain and --threads-per-rank above 1 do not go together: "));
  const Finished idle = run_program(
      {"train", "--config", "runs/first/config.json", "--name", "idle", "--devices", "5xcpu", "--epochs", "1"},
      surroundings());
  ASSERT_EQ(idle.code, 0) << idle.err;
  EXPECT_THAT(idle.err, HasSubstr("lockstep: warning: 3 of the 5 ranks have nothing to do"));
  EXPECT_THAT(run_program({"train", "--resume", "runs/first", "--epochs", "3", "--grain", "8"}, surroundings()).err,
              HasSubstr("its run has grain 16, and this one 8"));
}

TEST_F(CliUpdate, RefusesWhatMakesNoSense) {
  expect_refused({"--recipe", "fast", "--model", "mlp"}, {"--recipe fast", "lenet", "mlp"});
  expect_refused({"--recipe", "slow"}, {"\"slow\"", "fast"});
  expect_refused({"--grain", "0"}, {"--grain: 0 is too small"});
  expect_refused({"--grain", "33"}, {"--grain is 33; it must be from 1 to 32"});
  expect_refused({"--balance", "fast"}, {"\"fast\"", "equal, auto, or a share for each device, as in 2,1"});
  expect_refused({"--balance", "2,1,1"}, {"--balance", "3 shares for 2 parts"});
  expect_refused({"--optimizer", "sgdm"}, {"\"sgdm\"", "sgd, adam, adamw, lars or lamb"});
  expect_refused({"--optimizer", "adam", "--momentum", "0.9"}, {"--momentum goes with", "adam"});
  expect_refused({"--weight-decay", "-1"}, {"--weight-decay: -1 is too small"});
  expect_refused({"--scale-batch", "0"}, {"--scale-batch: 0 is too small"});
  expect_refused({"--accumulate", "0"}, {"--accumulate: 0 is too small"});
  expect_refused({"--scale-lr", "square"}, {"\"square\"", "none, sqrt or linear"});
  expect_refused({"--schedule", "exp"}, {"\"exp\"", "constant, step or cosine"});
  expect_refused({"--schedule", "step"}, {"--step-epochs 30,60,80"});
  expect_refused({"--schedule", "step", "--step-epochs", "1,x"}, {"--step-epochs: x is not a whole number"});
  expect_refused({"--schedule", "step", "--step-epochs", ""}, {"--step-epochs"});
}

}  // namespace cli_update_test
