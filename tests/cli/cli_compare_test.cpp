// Labels: program long repeated
// lockstep-bench compare: every scheme trains the same, and what it reports of bytes is exact.
#include <nlohmann/json.hpp>

#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "cli_fixture.hpp"

namespace cli_compare_test {

using lockstep::Cli;
using lockstep::Finished;
using lockstep::run_bench;
using lockstep::run_program;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

class CliCompare : public Cli {
 protected:
  Finished compare_mlp(const std::string& devices, const std::vector<std::string>& more,
                       const std::string& width = "0.0625") {
    std::vector<std::string> words = {"compare",   "--model",   "mlp",       "--width",  width,
                                      "--data",    "synthetic", "--devices", devices,    "--batch-size",
                                      "24",        "--steps",   "3",         "--rounds", "1",
                                      "--seconds", "0.05",      "--json",    "all.json"};
    words.insert(words.end(), more.begin(), more.end());
    return run_bench(words, surroundings());
  }

  // The schemes by name.
  std::map<std::string, nlohmann::json> compare(const std::string& devices, const std::vector<std::string>& more = {}) {
    const Finished run = compare_mlp(devices, more);
    EXPECT_EQ(run.code, 0) << run.err;
    EXPECT_THAT(run.out, AllOf(HasSubstr("speed-up"), HasSubstr("activations"), HasSubstr("one device")));
    std::map<std::string, nlohmann::json> schemes;
    std::ifstream file(work_ / "all.json");
    const auto all = nlohmann::json::parse(file);
    for (const auto& scheme : all.at("schemes")) {
      schemes[scheme.at("name").get<std::string>().substr(0, scheme.at("name").get<std::string>().find(", 1f1b"))] =
          scheme;
    }
    return schemes;
  }
};

// 784 -> 32, five times 32 -> 32, 32 -> 10.
constexpr int64_t parameter_bytes = 4 * (784 * 32 + 32 + 5 * (32 * 32 + 32) + 32 * 10 + 10);

TEST_F(CliCompare, EverySchemeOfTwoDevicesTrainsTheSame) {
  const auto schemes = compare("2xcpu");
  const auto& alone = schemes.at("one device");
  EXPECT_EQ(alone.at("bytes_sent"), 0);
  EXPECT_EQ(alone.at("parameter_bytes"), parameter_bytes);
  int pipelines = 0;
  for (const auto& [name, scheme] : schemes) {
    SCOPED_TRACE(name);
    EXPECT_NEAR(scheme.at("final_loss").get<double>(), alone.at("final_loss").get<double>(), 1e-4);
    if (const int stage = scheme.at("zero_stage"); stage == 0 || stage == 3) {
      EXPECT_EQ(scheme.at("gradient_bytes"), scheme.at("parameter_bytes"));
      EXPECT_EQ(scheme.at("optimizer_bytes"), scheme.at("parameter_bytes"));
    }
    EXPECT_GT(scheme.at("step_seconds"), 0);
    EXPECT_GT(scheme.at("activation_bytes"), 0);
    if (scheme.at("tensor_rule") == "channels" && scheme.at("zero_stage") == 0) {
      const double measured = scheme.at("memory_bytes");
      EXPECT_NEAR(scheme.at("predicted_memory_bytes").get<double>(), measured, 0.25 * measured);
    } else {
      EXPECT_FALSE(scheme.contains("predicted_memory_bytes"));
    }
    EXPECT_GE(scheme.at("idle_share"), 0);
    EXPECT_LT(scheme.at("idle_share"), 1);
    const double microbatches = scheme.at("stages_per_rank").get<double>() * scheme.at("microbatches").get<double>();
    const double others = scheme.at("pipeline").get<double>() - 1;
    EXPECT_DOUBLE_EQ(scheme.at("formula_idle_share").get<double>(), others / (microbatches + others));
    if (&scheme == &alone) continue;
    EXPECT_GT(scheme.at("bytes_sent"), 0);
    if (scheme.at("data") == 1) EXPECT_LT(scheme.at("parameter_bytes"), parameter_bytes);
    if (scheme.at("pipeline") == 2) ++pipelines;
  }
  EXPECT_EQ(pipelines, 4);
  // 2 (k - 1) / k of the gradients, and of the report beside them: a number for each parameter, six for each rank.
  EXPECT_EQ(schemes.at("data 2").at("bytes_sent"), parameter_bytes + 8 * (14 + 6 * 2));
  // ZeRO: of what is divided each rank has half, in whole lines. Stage 1 has the averages beside its own gradients.
  const auto& one = schemes.at("data 2, ZeRO 1");
  const auto& two = schemes.at("data 2, ZeRO 2");
  const auto& three = schemes.at("data 2, ZeRO 3");
  for (const auto& half :
       {one.at("optimizer_bytes"), two.at("optimizer_bytes"), two.at("gradient_bytes"), three.at("parameter_bytes")}) {
    EXPECT_GE(half, 0.5 * parameter_bytes);
    EXPECT_LE(half, 0.51 * parameter_bytes);
  }
  EXPECT_EQ(one.at("parameter_bytes"), parameter_bytes);
  EXPECT_EQ(two.at("parameter_bytes"), parameter_bytes);
  EXPECT_GE(one.at("gradient_bytes"), 1.5 * parameter_bytes);
  EXPECT_LE(one.at("gradient_bytes"), 1.51 * parameter_bytes);
  // A reduce-scatter and an allgather send what an allreduce does. Stage 3 gathers a second time, but not the unit that
  // it has just used, which is most of this net.
  for (const auto& stage : {one, two, three}) {
    EXPECT_NEAR(stage.at("bytes_sent"), parameter_bytes, 0.02 * parameter_bytes);
  }
  // The first layer's weights are most of the net, and each rank has half of them.
  EXPECT_LT(schemes.at("tensor 2").at("parameter_bytes"), 0.6 * parameter_bytes);
}

TEST_F(CliCompare, FourDevicesAlsoHaveMeshes) {
  const auto schemes = compare("4xcpu");
  for (const char* name : {"data 4", "data 4, ZeRO 1", "data 4, ZeRO 2", "data 4, ZeRO 3", "data 2 x pipeline 2",
                           "data 2 x tensor 2", "pipeline 2 x tensor 2", "tensor 4", "tensor 4, alternating"}) {
    ASSERT_EQ(schemes.count(name), 1u) << name;
    EXPECT_NEAR(schemes.at(name).at("final_loss").get<double>(),
                schemes.at("one device").at("final_loss").get<double>(), 1e-4);
  }
}

// The predictions are those for the described cluster, whose devices are slow; the runs are real.
TEST_F(CliCompare, ASimulationIsHeldAgainstRealRuns) {
  work_.write("slow.json",
              R"({"devices": [{"count": 4, "speed": 1e-4}], "within": {"latency": 0, "bytes_per_second": 0}})");
  ASSERT_EQ(run_program({"plan", "--model", "mlp", "--width", "0.0625", "--simulate", "slow.json", "--batch-size", "24",
                         "--seconds", "0.2", "--keep-profile", "mlp.json"},
                        surroundings())
                .code,
            0);
  for (const std::vector<std::string>& profile : {std::vector<std::string>{}, {"--profile", "mlp.json"}}) {
    std::vector<std::string> more = {"--simulate", "slow.json"};
    more.insert(more.end(), profile.begin(), profile.end());
    const auto schemes = compare("2xcpu", more);
    for (const char* name : {"one device", "data 2", "tensor 2", "pipeline"}) {
      ASSERT_EQ(schemes.count(name), 1u) << name;
      EXPECT_GT(schemes.at(name).at("predicted_seconds"), 100 * schemes.at(name).at("step_seconds").get<double>());
    }
  }
  const auto refused = [](const Finished& run) {
    EXPECT_NE(run.code, 0);
    EXPECT_THAT(run.out, Not(HasSubstr("step ms")));
    return run.err;
  };
  EXPECT_THAT(refused(compare_mlp("5xcpu", {"--simulate", "slow.json"})),
              AllOf(HasSubstr("slow.json"), HasSubstr("describes 4 devices"), HasSubstr("5 are to train")));
  EXPECT_THAT(refused(compare_mlp("2xcpu", {"--simulate", "slow.json", "--profile", "mlp.json"}, "0.125")),
              AllOf(HasSubstr("mlp.json"), HasSubstr("mlp, width 0.0625"), HasSubstr("mlp, width 0.125")));
  EXPECT_THAT(refused(compare_mlp("2xcpu", {"--profile", "mlp.json"})), HasSubstr("goes with --simulate"));
}

TEST_F(CliCompare, BadFlagsAreToldBeforeAnythingIsMeasured) {
  const auto error = [&](std::vector<std::string> words) {
    words.insert(words.begin(), "compare");
    const Finished run = run_bench(words, surroundings());
    EXPECT_EQ(run.code, 2) << run.err;
    EXPECT_THAT(run.out, Not(HasSubstr("step ms")));
    return run.err;
  };
  EXPECT_THAT(error({"--model", "lennet"}), AllOf(HasSubstr("lennet"), HasSubstr("lenet")));
  EXPECT_THAT(error({"--data", "mnist"}), HasSubstr("fashion-mnist or synthetic"));
  EXPECT_THAT(error({"--devices", "none"}), HasSubstr("none"));
  EXPECT_THAT(error({"--steps", "0"}), HasSubstr("at least 1"));
  EXPECT_THAT(error({"--model", "lenet", "--width", "2"}), HasSubstr("lenet"));
}

TEST_F(CliCompare, TooFewImagesAreToldBeforeAnythingIsMeasured) {
  const Finished run = run_bench({"compare", "--model", "mlp", "--width", "0.0625", "--data", "synthetic", "--devices",
                                  "2xcpu", "--batch-size", "30000", "--steps", "1", "--seconds", "0"},
                                 surroundings());
  EXPECT_EQ(run.code, 2);
  EXPECT_EQ(run.out, "");
  EXPECT_THAT(run.err, AllOf(HasSubstr("of 30000 samples each, need more images than there are, 60000"),
                             HasSubstr("smaller batch")));
}

}  // namespace cli_compare_test
