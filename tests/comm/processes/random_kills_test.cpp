// Labels: processes program repeated
// lockstep train that is killed a hundred times, at random moments, and goes on each time from what it finds: the bits
// are those of a run in peace. (killed_writes_test kills at the calls that write.)
#include "cli/cli_fixture.hpp"
#include "running_job.hpp"

#include <atomic>
#include <chrono>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace random_kills_test {

using namespace lockstep;
using namespace std::chrono_literals;

const std::vector<Words> kWays = {{"--devices", "cpu"},
                                  {"--devices", "2xcpu", "--momentum", "0.9"},
                                  {"--devices", "2xcpu", "--optimizer", "adam", "--lr", "0.002", "--zero-stage", "2"},
                                  {"--devices", "2xcpu", "--compress", "powersgd"},
                                  {"--devices", "3xcpu", "--grain", "8", "--optimizer", "adam", "--lr", "0.002"}};
constexpr int kSeries = 10, kKillsInEach = 10;
const char* const kWeights = "runs/a/model.safetensors";

class RandomKills : public Cli {
 protected:
  Surroundings in(const ScratchFolder& folder) const {
    return {.folder = folder.path(), .environment = {"PATH=/nowhere", "LC_ALL=C.UTF-8"}};
  }

  Words words(const Words& way) const {
    return train(Words{"--model", "mlp", "--width", "0.125", "--epochs", "100", "--checkpoint-every", "3",
                       "--keep-last", "2", "--resume", "auto", "--name", "a"} +
                 way);
  }
};

TEST_F(RandomKills, AHundredChangeNoBit) {
  std::vector<std::string> undisturbed(kWays.size());
  side_by_side(static_cast<int>(kWays.size()), [&](int way) {
    const ScratchFolder folder;
    const auto run = run_program(words(kWays[way]), in(folder));
    EXPECT_EQ(run.code, 0) << run.err;
    undisturbed[way] = folder.read(kWeights);
  });
  std::atomic<int> kills{0};
  side_by_side(kSeries, [&](int series) {
    const size_t way = series % kWays.size();
    std::mt19937 random(series);
    const ScratchFolder folder;
    for (int i = 0; i < kKillsInEach; ++i) {
      Program program(words(kWays[way]), in(folder));
      // One has its data and may not have begun; the other has come further than the one before. In a step, between two
      // epochs, in a checkpoint.
      ASSERT_TRUE(program.wait_for(i % 2 == 0 ? "run folder" : "\nepoch "));
      std::this_thread::sleep_for(std::uniform_int_distribution<int>(0, 100)(random) * 1ms);
      program.send(SIGKILL);
      if (program.finish().signal == SIGKILL) ++kills;
    }
    const auto last = run_program(words(kWays[way]), in(folder));
    SCOPED_TRACE("series " + std::to_string(series));
    EXPECT_EQ(last.code, 0) << last.err;
    EXPECT_TRUE(folder.read(kWeights) == undisturbed[way]) << "other bits";
    EXPECT_EQ(read_metrics(folder / "runs/a/metrics.jsonl").size(), 100u);
    for (const auto& entry : std::filesystem::recursive_directory_iterator(folder.path())) {
      EXPECT_NE(entry.path().extension(), ".tmp") << entry.path();
    }
  });
  EXPECT_EQ(kills, kSeries * kKillsInEach);  // else a run was at its end before
}

}  // namespace random_kills_test
