// Labels: program
// lockstep plan: what it prints and keeps, and that bad flags and files are told.
#include <lockstep/models/models.hpp>
#include <lockstep/plan/plan.hpp>
#include <nlohmann/json.hpp>

#include <string>
#include <vector>

#include "cli_fixture.hpp"

namespace cli_plan_test {

using namespace lockstep;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

class CliPlan : public Cli {
 protected:
  // A small model, measured for moments.
  static std::vector<std::string> plan(const std::vector<std::string>& more) {
    std::vector<std::string> words = {"plan",         "--model", "mlp",       "--width", "0.125",
                                      "--batch-size", "16",      "--seconds", "0.05"};
    words.insert(words.end(), more.begin(), more.end());
    return words;
  }
};

const char* const described = R"({
  "devices": [{"count": 64, "speed": 10, "memory_bytes": 16e9}],
  "devices_per_node": 8,
  "within": {"latency": 1e-6, "bytes_per_second": 1e11},
  "between": {"latency": 1e-5, "bytes_per_second": 1e10}
})";

TEST_F(CliPlan, MeasuresAndKeepsAPlanForThisMachine) {
  const Finished run = run_program(plan({"--devices", "2xcpu", "--out", "plan.json"}), surroundings());
  ASSERT_EQ(run.code, 0) << run.err;
  EXPECT_EQ(run.err, "");
  EXPECT_THAT(run.out, AllOf(HasSubstr("mlp, width 0.125"), HasSubstr("[cpu, cpu]"), HasSubstr("fc1"),
                             HasSubstr("one device"), HasSubstr("2 x 1 x 1"), HasSubstr("1 x 2 x 1"),
                             HasSubstr("1 x 1 x 2"), HasSubstr("chosen"), HasSubstr("kept in plan.json")));
  const Plan kept = read_plan(work_ / "plan.json");
  EXPECT_EQ(kept.model, "mlp");
  EXPECT_EQ(kept.options, "width 0.125");
  EXPECT_EQ(kept.devices, "cpu,cpu");
  EXPECT_EQ(kept.batch_size, 16);
  EXPECT_GT(kept.prediction.step_seconds, 0);
  EXPECT_NO_THROW(check_plan(kept, make_model({.name = "mlp", .width = 0.125}), 2));
}

TEST_F(CliPlan, SimulatesAClusterAlsoFromAKeptProfile) {
  work_.write("cluster.json", described);
  const Finished run = run_program(plan({"--simulate", "cluster.json", "--keep-profile", "profile.json", "--schedules",
                                         "gpipe", "--out", "plan.json"}),
                                   surroundings());
  ASSERT_EQ(run.code, 0) << run.err;
  EXPECT_THAT(run.out, AllOf(HasSubstr("64 of cluster.json"), HasSubstr("slices by channels"), HasSubstr("idle"),
                             Not(HasSubstr("1f1b"))));
  const Plan kept = read_plan(work_ / "plan.json");
  EXPECT_EQ(kept.split.mesh.size(), 64);
  EXPECT_EQ(kept.devices, "");

  const Finished again = run_program(
      {"plan", "--profile", "profile.json", "--simulate", "cluster.json", "--batch-size", "16", "--schedules", "gpipe"},
      surroundings());
  ASSERT_EQ(again.code, 0) << again.err;
  EXPECT_EQ(again.out, run.out.substr(0, run.out.find("the plan is kept")));
}

TEST_F(CliPlan, SaysWhenOneDeviceAloneWouldBeFaster) {
  work_.write("one.json", R"({"devices": [{"count": 1}], "within": {"latency": 1, "bytes_per_second": 1}})");
  work_.write("slow.json", R"({"devices": [{"count": 2}], "within": {"latency": 1, "bytes_per_second": 1}})");
  const Finished one = run_program(plan({"--simulate", "one.json", "--keep-profile", "profile.json"}), surroundings());
  const Finished slow = run_program({"plan", "--profile", "profile.json", "--simulate", "slow.json"}, surroundings());
  ASSERT_EQ(one.code + slow.code, 0) << one.err << slow.err;
  EXPECT_THAT(one.out, Not(HasSubstr("one device alone")));
  EXPECT_THAT(slow.out, HasSubstr("one device alone would be faster"));
}

TEST_F(CliPlan, WhatWasMeasuredOfTheDevicesCanBeSimulated) {
  ASSERT_EQ(run_program(plan({"--devices", "2xcpu", "--keep-cluster", "here.json", "--keep-profile", "profile.json"}),
                        surroundings())
                .code,
            0);
  EXPECT_EQ(read_cluster(work_ / "here.json").devices.size(), 2u);
  const Finished run = run_program({"plan", "--profile", "profile.json", "--simulate", "here.json"}, surroundings());
  EXPECT_EQ(run.code, 0) << run.err;
}

TEST_F(CliPlan, WhatCannotBeIsAnError) {
  work_.write("cluster.json", described);
  work_.write("wrong.json", R"({"devices": [{"count": 2, "price": 3}], "within": {}})");
  auto small = nlohmann::json::parse(described);
  small["devices"][0]["memory_bytes"] = 1000;
  work_.write("small.json", small.dump());
  const auto fails = [&](const std::vector<std::string>& words, int code, const testing::Matcher<std::string>& says) {
    const Finished run = run_program(words, surroundings());
    EXPECT_EQ(run.code, code) << run.err;
    EXPECT_THAT(run.err, says);
  };
  fails({"plan", "--model", "lenot"}, 2, AllOf(HasSubstr("lenet"), HasSubstr("lockstep plan --help shows")));
  fails({"plan", "--model", "lenet", "--width", "2"}, 2, HasSubstr("width"));
  fails({"plan", "--schedules", "1f1b,fastest"}, 2, AllOf(HasSubstr("fastest"), HasSubstr("interleaved")));
  fails({"plan", "--batch-size", "0"}, 2, HasSubstr("at least 1"));
  fails({"plan", "--profile", "none.json"}, 2, HasSubstr("--simulate"));
  fails({"plan", "--simulate", "cluster.json", "--keep-cluster", "c.json"}, 2, HasSubstr("no cluster is measured"));
  for (const char* flag : {"--out", "--keep-profile", "--keep-cluster"}) {  // before it measures, which takes --seconds
    const Finished run = run_program(plan({"--seconds", "1000", flag, work_.path().string()}), surroundings());
    EXPECT_EQ(run.code, 1);
    EXPECT_THAT(run.err, AllOf(HasSubstr(work_.path().string()), HasSubstr("it is a directory")));
  }
  fails({"plan", "--simulate", "none.json"}, 1, AllOf(HasSubstr("none.json"), HasSubstr("No such file")));
  fails({"plan", "--simulate", "wrong.json"}, 1, AllOf(HasSubstr("wrong.json"), HasSubstr("\"devices[0].price\"")));
  fails(plan({"--simulate", "small.json"}), 1, AllOf(HasSubstr("no plan for \"mlp\" fits"), HasSubstr("1 kB")));
}

}  // namespace cli_plan_test
