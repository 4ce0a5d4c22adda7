// lockstep bench: what it prints and writes, and that bad flags are told.
#include <nlohmann/json.hpp>

#include <fstream>

#include "cli_fixture.hpp"

namespace {

using lockstep::Cli;
using lockstep::Finished;
using lockstep::run_program;
using testing::AllOf;
using testing::HasSubstr;

class CliBench : public Cli {};

TEST_F(CliBench, OverlapPrintsATableAndWritesJson) {
  const Finished run = run_program({"bench", "overlap", "--devices", "2xcpu", "--model", "mlp", "--batch-size", "4",
                                    "--steps", "2", "--json", "overlap.json"},
                                   surroundings());
  ASSERT_EQ(run.code, 0) << run.err;
  EXPECT_THAT(run.out, AllOf(HasSubstr("25.2 million parameters"), HasSubstr("afterwards"), HasSubstr("overlapped"),
                             HasSubstr("hidden behind backward")));
  const auto json = nlohmann::json::parse(std::ifstream(work_ / "overlap.json"));
  const auto& model = json.at("models").at(0);
  EXPECT_EQ(model.at("parameters"), 25198602);
  EXPECT_EQ(model.at("afterwards").at("reduced_share"), 0);
  EXPECT_GT(model.at("afterwards").at("after_seconds"), 0);
  EXPECT_EQ(model.at("alone").at("after_seconds"), 0);
  // All layers but the first are averaged while an earlier one is computed, unless a rank comes much later.
  EXPECT_GT(model.at("overlapped").at("within_seconds"), 0);
  EXPECT_LE(model.at("hidden_share"), 1);
}

TEST_F(CliBench, BadFlagsAreErrors) {
  EXPECT_THAT(run_program({"bench", "overlap", "--model", "lenet"}, surroundings()).err,
              HasSubstr("mlp, resnet18 or all"));
  EXPECT_THAT(run_program({"bench", "overlap", "--steps", "0"}, surroundings()).err, HasSubstr("at least 1"));
  EXPECT_THAT(run_program({"bench", "overlap", "--bucket-bytes", "0", "--steps", "1"}, surroundings()).err,
              HasSubstr("bucket_bytes is 0"));
  EXPECT_EQ(run_program({"bench"}, surroundings()).code, 2);
}

}  // namespace
