// Labels: program thorough
// lockstep-bench: what it prints and writes, and that bad flags are told.
#include <nlohmann/json.hpp>

#include <filesystem>
#include <fstream>
#include <map>
#include <string>

#include "cli_fixture.hpp"

namespace cli_bench_test {

namespace fs = std::filesystem;
using lockstep::Cli;
using lockstep::Finished;
using lockstep::ReportData;
using lockstep::run_bench;
using testing::AllOf;
using testing::HasSubstr;

class CliBench : public Cli {};

TEST_F(CliBench, OverlapPrintsATableAndWritesJson) {
  const Finished run = run_bench({"overlap", "--devices", "2xcpu", "--model", "mlp", "--batch-size", "4", "--steps",
                                  "2", "--json", "overlap.json"},
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

TEST_F(CliBench, AllreduceMeasuresEverySizeAndAlgorithmAndPeer) {
  const Finished run = run_bench({"allreduce", "--devices", "2xcpu", "--sizes", "40,4000", "--rounds", "1", "--peers",
                                  "--json", "sums.json", "--plot", "sums.html"},
                                 surroundings());
  ASSERT_EQ(run.code, 0) << run.err;
  EXPECT_THAT(run.out, AllOf(HasSubstr("busbw GB/s"), HasSubstr("ranks"), HasSubstr("memcpy")));
  const auto json = nlohmann::json::parse(std::ifstream(work_ / "sums.json"));
  std::map<std::string, int> measured;
  for (const auto& result : json.at("results")) {
    ++measured[result.at("name").get<std::string>()];
    EXPECT_GT(result.at("seconds"), 0);
    if (result.at("name") == "memcpy") continue;
    // With two ranks the bus carries as many bytes as the tensor has.
    EXPECT_NEAR(result.at("bus_bytes_per_second").get<double>(),
                result.at("bytes").get<double>() / result.at("seconds").get<double>(), 1);
  }
  for (const char* name : {"ranks", "grains", "naive", "sharded", "ring", "tree", "memcpy"})
    EXPECT_EQ(measured[name], 2) << name;
  for (const char* peer : {"gloo", "openmpi"}) {  // measured, or it is said why not
    if (measured[peer] == 2) continue;
    EXPECT_THAT(run.out, HasSubstr(std::string(peer) + ": not measured: "));
    EXPECT_NE(json.at("not_measured").at(peer), "");
  }
  const ReportData page(work_ / "sums.html");
  EXPECT_EQ(page.all()["charts"][0]["lines"][0]["points"].size(), 2u);
}

TEST_F(CliBench, StepSaysWhatDataParallelAdds) {
  const Finished run = run_bench(
      {"step", "--devices", "2xcpu", "--rounds", "2", "--steps", "10", "--json", "step.json"}, surroundings());
  ASSERT_EQ(run.code, 0) << run.err;
  EXPECT_THAT(run.out, AllOf(HasSubstr("alone"), HasSubstr("data parallel"), HasSubstr("added")));
  const auto json = nlohmann::json::parse(std::ifstream(work_ / "step.json"));
  EXPECT_GT(json.at("alone_seconds"), 0);
  EXPECT_GT(json.at("data_parallel_seconds"), 0);
}

TEST_F(CliBench, BitsAreTheSameOnEveryLayout) {
  lockstep::Surroundings around = surroundings();
  around.starts_itself = true;
  const Finished run = run_bench({"bits", "--data-dir", images_.path().string(), "--batch-size", "100", "--grain", "16",
                                  "--runs-dir", "kept", "--json", "bits.json"},
                                 around);
  EXPECT_EQ(run.code, 0) << run.out << run.err;
  EXPECT_THAT(run.out, AllOf(HasSubstr("lenet on fashion-mnist, 1 epoch, batches of 100 in grains of 16"),
                             HasSubstr("lockstep launch -n 2 "), HasSubstr("lockstep launch -n 3 --elastic "),
                             HasSubstr("--zero-stage 3"), HasSubstr("--config "),
                             HasSubstr("\nthe same bits on all of them\n")));
  const auto json = nlohmann::json::parse(std::ifstream(work_ / "bits.json"));
  EXPECT_EQ(json.at("same"), true);
  EXPECT_EQ(json.at("layouts").size(), 27u);
  for (const auto& layout : json.at("layouts")) {
    EXPECT_EQ(layout.at("weights"), json.at("layouts").at(0).at("weights")) << layout;
    EXPECT_EQ(layout.at("train_loss"), json.at("layouts").at(0).at("train_loss")) << layout;
  }
  EXPECT_TRUE(fs::exists(work_ / "kept/2-processes/metrics.jsonl"));
}

TEST_F(CliBench, GrainSaysWhatItCosts) {
  const Finished run = run_bench({"grain", "--devices", "2xcpu", "--model", "mlp", "--width", "0.125", "--batch-size",
                                  "50", "--grain", "8", "--rounds", "2", "--steps", "2", "--json", "grain.json"},
                                 surroundings());
  ASSERT_EQ(run.code, 0) << run.err;
  EXPECT_THAT(run.out, AllOf(HasSubstr("mlp, width 0.125 on [cpu, cpu], batches of 50 in grains of 8"),
                             HasSubstr("without a grain"), HasSubstr("ratio")));
  const auto json = nlohmann::json::parse(std::ifstream(work_ / "grain.json"));
  EXPECT_GT(json.at("seconds_without"), 0);
  EXPECT_GT(json.at("seconds_with"), 0);
}

TEST_F(CliBench, ServerShowsEachWaysLossOverTime) {
  const Finished run = run_bench({"server", "--devices", "3xcpu", "--data", "synthetic", "--samples", "300",
                                  "--batch-size", "30", "--epochs", "2", "--json", "server.json"},
                                 surroundings());
  ASSERT_EQ(run.code, 0) << run.err;
  EXPECT_THAT(run.out, AllOf(HasSubstr("allreduce, 3 workers: "), HasSubstr("synchronous, 2 workers: "),
                             HasSubstr("asynchronous, 2 workers: "), HasSubstr("bounded by 2, 2 workers: ")));
  const auto json = nlohmann::json::parse(std::ifstream(work_ / "server.json"));
  const auto& ways = json.at("ways");
  ASSERT_EQ(ways.size(), 4u);
  for (const auto& way : ways) {
    const auto& epochs = way.at("epochs");
    ASSERT_EQ(epochs.size(), 2u);
    EXPECT_GT(epochs[1].at("seconds"), epochs[0].at("seconds"));
    EXPECT_NEAR(way.at("images_per_second").get<double>(), 600 / epochs[1].at("seconds").get<double>(), 1e-6);
  }
  // One training in two ways, but for rounding.
  const auto loss = [&](size_t way) { return ways[way].at("epochs")[1].at("test_loss").get<double>(); };
  EXPECT_NEAR(loss(0), loss(1), 1e-3);
  EXPECT_NE(loss(1), loss(2));
}

TEST_F(CliBench, BadFlagsAreErrors) {
  EXPECT_THAT(run_bench({"server", "--devices", "2xcpu", "--servers", "2"}, surroundings()).err,
              HasSubstr("leaves no worker"));
  EXPECT_THAT(run_bench({"server", "--data", "cifar"}, surroundings()).err, HasSubstr("fashion-mnist or synthetic"));
  EXPECT_THAT(run_bench({"overlap", "--model", "lenet"}, surroundings()).err, HasSubstr("mlp, resnet18 or all"));
  EXPECT_THAT(run_bench({"overlap", "--steps", "0"}, surroundings()).err, HasSubstr("at least 1"));
  EXPECT_THAT(run_bench({"overlap", "--bucket-bytes", "0", "--steps", "1"}, surroundings()).err,
              HasSubstr("bucket_bytes is 0"));
  EXPECT_THAT(run_bench({"allreduce", "--sizes", "6"}, surroundings()).err, HasSubstr("not whole floats"));
  EXPECT_THAT(run_bench({"grain", "--grain", "512"}, surroundings()).err,
              HasSubstr("--grain is 512; it must be at most --batch-size, 256"));
  EXPECT_THAT(run_bench({"step", "--steps", "0"}, surroundings()).err, HasSubstr("at least 1"));
  const Finished unknown = run_bench({"foo"}, surroundings());
  EXPECT_EQ(unknown.code, 2);
  EXPECT_THAT(
      unknown.err,
      HasSubstr("lockstep-bench: lockstep-bench has no command foo; there are allreduce, bits, compare, grain"));
  EXPECT_THAT(run_bench({"step", "--bogus"}, surroundings()).err, HasSubstr("lockstep-bench step --help shows"));
  EXPECT_THAT(run_bench({"bits", "--model", "gpt"}, surroundings()).err,
              HasSubstr("gpt learns from a text; give one with --text"));
}

}  // namespace cli_bench_test
