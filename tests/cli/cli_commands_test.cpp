// lockstep plan and sweep, and lockstep-bench, once each on little data, so that AddressSanitizer reads them too. Other
// tests look at what they print and keep.
#include "cli_fixture.hpp"

#include <string>
#include <vector>

namespace cli_commands_test {

using lockstep::Cli;
using lockstep::Finished;
using lockstep::run_bench;
using lockstep::run_program;

using CliCommands = Cli;
using Words = std::vector<std::string>;

void expect_good_end(const Words& words, const Finished& run) {
  EXPECT_EQ(run.code, 0) << words[0] << ": " << run.err;
}

TEST_F(CliCommands, EachEndsWell) {
  const std::string images = images_.path().string();
  // To measure devices and links would take seconds.
  work_.write("cluster.json", R"({"devices": [{"count": 2}], "within": {"latency": 1e-6, "bytes_per_second": 1e10}})");
  const std::vector<Words> commands = {
      {"plan", "--model", "mlp", "--width", "0.0625", "--devices", "cpu", "--batch-size", "8", "--seconds", "0.02",
       "--simulate", "cluster.json", "--keep-profile", "profile.json", "--out", "plan.json"},
      {"sweep", "--name", "grid", "--data-dir", images, "--model", "mlp", "--width", "0.0625", "--devices", "cpu",
       "2xcpu", "--batch-size", "100", "--lr", "0.05", "--epochs", "1"}};
  const std::vector<Words> benches = {
      {"allreduce", "--devices", "2xcpu", "--sizes", "40", "--rounds", "1", "--plot", "sums.html"},
      {"overlap", "--devices", "2xcpu", "--model", "mlp", "--batch-size", "2", "--steps", "1", "--json",
       "overlap.json"},
      {"compare",   "--model",    "mlp",          "--width",   "0.0625",       "--data-dir", images,
       "--devices", "2xcpu",      "--batch-size", "8",         "--steps",      "1",          "--rounds",
       "1",         "--simulate", "cluster.json", "--profile", "profile.json", "--json",     "compare.json"},
      {"server", "--devices", "2xcpu", "--data-dir", images, "--batch-size", "100", "--epochs", "1", "--json",
       "server.json"},
      {"step", "--devices", "2xcpu", "--rounds", "1", "--steps", "2", "--json", "step.json"}};
  for (const Words& words : commands) expect_good_end(words, run_program(words, surroundings()));
  for (const Words& words : benches) expect_good_end(words, run_bench(words, surroundings()));
}

}  // namespace cli_commands_test
