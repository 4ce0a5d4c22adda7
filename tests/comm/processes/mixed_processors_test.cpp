// Labels: processes program thorough
// A job whose processes compute on processors of several kinds. LibTorch's variable makes one of another kind here.
#include <ATen/Version.h>

#include "cli/cli_fixture.hpp"
#include "running_job.hpp"

#include <regex>
#include <string>

namespace mixed_processors_test {

using namespace lockstep;
using testing::AllOf;
using testing::ContainsRegex;
using testing::HasSubstr;
using testing::Not;

const std::string kDenormal = "(, denormal numbers as 0)?";
const std::string kProducts = "(, products by (AMX|oneDNN up to [0-9]+ features))?" + kDenormal;
const std::string kBoth = "rank 1 \\(cpu\\) computes on DEFAULT [0-9a-f]{8}" + kDenormal +
                          ", and rank 0 \\(cpu\\) on AVX[0-9]* [0-9a-f]{8}" + kProducts;

class MixedProcessors : public Cli {
 protected:
  void SetUp() override {
    if (at::get_cpu_capability() == "DEFAULT")
      GTEST_SKIP() << "LibTorch takes no special instructions here, so there is no other kind";
  }

  // Two processes, of which the second takes no special instructions.
  Finished run_mixed(const Words& program, const Words& variables = {}) const {
    auto around = surroundings();
    around.environment = around.environment + variables;
    return run_program(with_rank_1_doing("export ATEN_CPU_CAPABILITY=default", program), around);
  }
  Finished train_mixed(const Words& more, const Words& variables = {}) const {
    const Words all = train(Words{"--model", "mlp", "--width", "0.125", "--devices", "cpu", "--name", "mixed"} + more);
    return run_mixed(Words{from_environment("LOCKSTEP_PROGRAM")} + all, variables);
  }
};

TEST_F(MixedProcessors, AreRefusedWithAGrainBeforeTheFirstStep) {
  const auto job = train_mixed({"--grain", "8"});
  EXPECT_EQ(job.code, 1);
  EXPECT_THAT(job.err, ContainsRegex("with a grain the results must not depend on the number of ranks, and " + kBoth));
  EXPECT_THAT(job.err, HasSubstr("set LOCKSTEP_MIXED_PROCESSORS=1 for all"));
  EXPECT_FALSE(std::filesystem::exists(work_ / "runs/mixed/metrics.jsonl"));
}

TEST_F(MixedProcessors, AreAWarningWithoutAGrain) {
  const auto job = run_mixed({ranks_program(), "collectives"});
  expect_all_ok(job, 2);
  EXPECT_THAT(job.err, ContainsRegex("lockstep: " + kBoth + "[.] These round otherwise"));
}

TEST_F(MixedProcessors, AreAWarningWithAGrainToo) {
  const auto job = train_mixed({"--grain", "8", "--epochs", "1"}, {"LOCKSTEP_MIXED_PROCESSORS=1"});
  EXPECT_THAT(job.err, ContainsRegex(kBoth + "[.] These round otherwise"));
  EXPECT_THAT(job.err, Not(HasSubstr("must not depend")));
}

// Without fused instructions an update itself rounds otherwise.
TEST_F(MixedProcessors, AreNamedWhereReplicasDiffer) {
  const auto job = train_mixed({"--optimizer", "adam", "--lr", "0.01"});
  EXPECT_EQ(job.code, 1);
  EXPECT_THAT(job.err,
              ContainsRegex("no longer equal: .*[.] That is to be expected of another kind of processor: " + kBoth));
}

TEST_F(MixedProcessors, AreNamedWhereArithmeticDiffers) {
  const auto job = train_mixed({"--grain", "8", "--check-arithmetic", "1"}, {"LOCKSTEP_MIXED_PROCESSORS=1"});
  EXPECT_EQ(job.code, 1);
  EXPECT_THAT(
      job.err,
      ContainsRegex("get different bits in .*[.] That is to be expected of another kind of processor: " + kBoth));
  EXPECT_THAT(job.err, Not(HasSubstr("is faulty")));
}

TEST_F(MixedProcessors, OneThatAllowsThemAndOneThatDoesNotAreRefused) {
  const auto job = run_program(
      with_rank_1_doing("export LOCKSTEP_MIXED_PROCESSORS=1", {ranks_program(), "collectives"}), surroundings());
  EXPECT_EQ(job.code, 3);
  EXPECT_THAT(job.err, HasSubstr("cpu ranks on any processors (LOCKSTEP_MIXED_PROCESSORS=1); process 0: cpu ranks"));
}

TEST_F(MixedProcessors, ACheckpointOfAnotherKindIsAWarning) {
  const auto train_on = [&](const Words& more, const Words& variables) {
    auto around = surroundings();
    around.environment = around.environment + variables;
    around.starts_itself = true;  // a copy of this test would be of its kind
    return run_program(train(Words{"--model", "mlp", "--width", "0.125"} + more), around);
  };
  const Words as_on_another = {"ATEN_CPU_CAPABILITY=default"};
  ASSERT_EQ(train_on({"--name", "run", "--epochs", "1"}, {}).code, 0);
  const auto same = train_on({"--resume", "runs/run", "--epochs", "2"}, {});
  EXPECT_EQ(same.code, 0);
  EXPECT_EQ(same.err, "");
  const auto other = train_on({"--resume", "runs/run", "--epochs", "3"}, as_on_another);
  EXPECT_EQ(other.code, 0);
  EXPECT_THAT(other.err, ContainsRegex("epoch-0002.safetensors' was written on another kind of processor, AVX[0-9]* "
                                       "[0-9a-f]{8}" +
                                       kProducts + "; this one is DEFAULT [0-9a-f]{8}"));
}

// The kind is the processor's alone.
TEST_F(MixedProcessors, DevicesShowTheKindWhateverTheThreads) {
  const auto kind = [&](const Words& variables) {
    auto around = surroundings();
    around.environment = around.environment + variables;
    around.starts_itself = true;
    const std::string out = run_program({"devices"}, around).out;
    std::smatch found;
    return std::regex_search(out, found, std::regex("arithmetic +([A-Z0-9]+ [0-9a-f]{8}),.*denormal numbers as 0"))
               ? found[1].str()
               : out;
  };
  const std::string here = kind({});
  EXPECT_TRUE(std::regex_match(here, std::regex("AVX[0-9]* [0-9a-f]{8}"))) << here;
  for (const char* threads : {"1", "2", "5"}) EXPECT_EQ(kind({"OMP_NUM_THREADS=" + std::string(threads)}), here);
  const std::string other = kind({"ATEN_CPU_CAPABILITY=default"});
  EXPECT_THAT(other, testing::StartsWith("DEFAULT "));
  EXPECT_NE(other.substr(other.find(' ')), here.substr(here.find(' ')));
}

}  // namespace mixed_processors_test
