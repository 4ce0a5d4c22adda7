// Labels: program
// The flags of lockstep train for fewer and smaller messages: what is shown, kept and run again; and what is refused.
#include "cli_fixture.hpp"

namespace cli_communication_test {

using lockstep::Cli;
using lockstep::Finished;
using lockstep::run_program;
using testing::AllOf;
using testing::ContainsRegex;
using testing::HasSubstr;
using testing::IsEmpty;

class CliCommunication : public Cli {};

TEST_F(CliCommunication, ShowsKeepsAndRepeatsWhatIsSent) {
  const Finished local = run_program(
      train({"--name", "local", "--sync-every", "4", "--outer-lr", "0.7", "--outer-momentum", "0.9"}), surroundings());
  ASSERT_EQ(local.code, 0) << local.err;
  EXPECT_THAT(local.out, AllOf(HasSubstr("\n  sync every        4\n  outer lr          0.7\n  outer momentum    0.9\n"),
                               ContainsRegex("% of the time; a rank sent 0.[0-9]+ MB per step\n")));
  // 10 steps in an epoch, three rounds.
  const Finished other = run_program({"train", "--config", "runs/local/config.json", "--name", "other", "--sync-every",
                                      "0", "--compress", "powersgd", "--compress-rank", "1"},
                                     surroundings());
  ASSERT_EQ(other.code, 0) << other.err;
  EXPECT_THAT(other.out, HasSubstr("\n  compress          powersgd\n  compress rank     1\n"));
  const Finished back = run_program(
      {"train", "--config", "runs/other/config.json", "--name", "back", "--compress", "fp16"}, surroundings());
  ASSERT_EQ(back.code, 0) << back.err;
  EXPECT_THAT(back.out, HasSubstr("\n  compress          fp16\n"));
  const double half = metrics("back")[1].bytes_per_step;
  // Averaged gradients travel with a report: a number for each of 8 parameters, six for each rank (BackwardReport).
  const double report = 8 * (8 + 6 * 2);
  const double starts = 2 * 8;  // two numbers by which the ranks compare where a round began
  EXPECT_DOUBLE_EQ(metrics("local")[1].bytes_per_step, (2 * (half - report) + starts) * 3 / 10);
  EXPECT_LT(metrics("other")[1].bytes_per_step, half);
}

TEST_F(CliCommunication, RefusesWhatMakesNoSense) {
  const auto expect_refused = [&](const std::vector<std::string>& flags, const std::string& part) {
    const Finished run = run_program(train(flags), surroundings());
    EXPECT_EQ(run.code, 2) << run.err;
    EXPECT_THAT(run.err, HasSubstr(part));
    EXPECT_THAT(work_.names(), IsEmpty());
  };
  expect_refused({"--compress", "int8"}, "none, bf16, fp16 or powersgd");
  expect_refused({"--compress-rank", "2"}, "--compress-rank and --compress other than powersgd do not go together");
  expect_refused({"--compress", "powersgd", "--compress-rank", "0"}, "--compress-rank: 0 is too small");
}

}  // namespace cli_communication_test
