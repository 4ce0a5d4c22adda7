#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <lockstep/trainer/metrics.hpp>

#include <algorithm>
#include <cmath>
#include <random>
#include <string>

#include "support/error_of.hpp"
#include "support/scratch_folder.hpp"

namespace lockstep {
namespace metrics_test {

using testing::ElementsAre;
using testing::EndsWith;
using testing::HasSubstr;

std::vector<EpochMetrics> some_history(int epochs) {
  std::mt19937 random(1);
  std::uniform_real_distribution<double> value(0, 1);
  std::vector<EpochMetrics> history;
  for (int epoch = 1; epoch <= epochs; ++epoch) {
    history.push_back({epoch, 2.3 * value(random), value(random), value(random), 100 * value(random), value(random),
                       value(random), 1e6 * value(random)});
  }
  return history;
}

class MetricsTest : public testing::Test {
 protected:
  Caught read_error(const std::string& text) {
    folder_.write("metrics.jsonl", text);
    return error_of([&] { read_metrics(folder_ / "metrics.jsonl"); });
  }
  ScratchFolder folder_;
};

TEST_F(MetricsTest, ReadsBackEveryBit) {
  for (int epochs : {0, 1, 2, 50}) {
    auto history = some_history(epochs);
    write_metrics(folder_ / "metrics.jsonl", history);
    auto read = read_metrics(folder_ / "metrics.jsonl");
    ASSERT_EQ(read.size(), history.size());
    for (size_t i = 0; i < read.size(); ++i) {
      EXPECT_EQ(read[i].epoch, history[i].epoch);
      EXPECT_EQ(read[i].train_loss, history[i].train_loss);
      EXPECT_EQ(read[i].train_accuracy, history[i].train_accuracy);
      EXPECT_EQ(read[i].test_accuracy, history[i].test_accuracy);
      EXPECT_EQ(read[i].seconds, history[i].seconds);
      EXPECT_EQ(read[i].data_wait, history[i].data_wait);
      EXPECT_EQ(read[i].lr, history[i].lr);
      EXPECT_EQ(read[i].bytes_per_step, history[i].bytes_per_step);
    }
  }
}

TEST_F(MetricsTest, WritesOneJsonObjectPerLine) {
  write_metrics(folder_ / "metrics.jsonl", {{1, 2.25, 0.125, 0.5, 11, 0.25, 0.2, 516272}, {2, 1, 1, 1, 1, 0}});
  std::string text = folder_.read("metrics.jsonl");
  EXPECT_EQ(text.substr(0, text.find('\n')),
            R"({"epoch":1,"train_loss":2.25,"train_accuracy":0.125,"test_accuracy":0.5,"seconds":11.0,)"
            R"("data_wait":0.25,"lr":0.2,"bytes_per_step":516272.0})");
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 2);
  EXPECT_THAT(folder_.names(), ElementsAre("metrics.jsonl"));
}

TEST_F(MetricsTest, SaysOnEveryLineThatDataAreSynthetic) {
  write_metrics(folder_ / "metrics.jsonl", some_history(2), /*synthetic=*/true);
  const std::string text = folder_.read("metrics.jsonl");
  for (size_t line = 0; line < text.size(); line = text.find('\n', line) + 1) {
    EXPECT_THAT(text.substr(line, text.find('\n', line) - line), EndsWith(",\"data\":\"synthetic\"}"));
  }
  EXPECT_EQ(read_metrics(folder_ / "metrics.jsonl").size(), 2u);
}

TEST_F(MetricsTest, KeepsALossThatDiverged) {
  write_metrics(folder_ / "metrics.jsonl", {{1, std::nan(""), 0.1, 0.1, 1, 0}, {2, INFINITY, 0.1, 0.1, 1, 0}});
  EXPECT_THAT(folder_.read("metrics.jsonl"), HasSubstr("\"train_loss\":null"));
  for (const EpochMetrics& epoch : read_metrics(folder_ / "metrics.jsonl")) {
    EXPECT_TRUE(std::isnan(epoch.train_loss));
    EXPECT_EQ(epoch.test_accuracy, 0.1);
  }
}

TEST_F(MetricsTest, ReadsFilesFromBeforeWaitsWereMeasuredAndRatesKept) {
  folder_.write("metrics.jsonl", R"({"epoch":1,"train_loss":2,"train_accuracy":0.1,"test_accuracy":0.1,"seconds":1})");
  EXPECT_EQ(read_metrics(folder_ / "metrics.jsonl").at(0).data_wait, 0);
  EXPECT_EQ(read_metrics(folder_ / "metrics.jsonl").at(0).lr, 0);
}

TEST_F(MetricsTest, KeepsTheHashOfTheWeights) {
  auto history = some_history(2);
  history[1].weights = "0123456789abcdef";
  write_metrics(folder_ / "metrics.jsonl", history, /*synthetic=*/true);
  EXPECT_THAT(folder_.read("metrics.jsonl"), EndsWith(R"(,"weights":"0123456789abcdef","data":"synthetic"})"
                                                      "\n"));
  const auto read = read_metrics(folder_ / "metrics.jsonl");
  EXPECT_EQ(read[0].weights, "");
  EXPECT_EQ(read[1].weights, history[1].weights);
  const std::string line = R"({"epoch":1,"train_loss":2,"train_accuracy":0,"test_accuracy":0,"seconds":1,"weights":7})";
  EXPECT_THAT(read_error(line), Fails(Error::file));
}

TEST_F(MetricsTest, KeepsWhatIsMeasuredOfTheTestSamples) {
  auto history = some_history(2);
  history[1].test = {{"loss", 0.1}, {"mae", INFINITY}};
  history[1].test_accuracy = std::nan("");
  write_metrics(folder_ / "metrics.jsonl", history);
  EXPECT_THAT(folder_.read("metrics.jsonl"), EndsWith(R"(,"test":{"loss":0.1,"mae":null}})"
                                                      "\n"));
  const auto read = read_metrics(folder_ / "metrics.jsonl");
  EXPECT_TRUE(read[0].test.empty());
  EXPECT_EQ(read[1].test.at("loss"), 0.1);
  EXPECT_TRUE(std::isnan(read[1].test.at("mae")) && std::isnan(read[1].test_accuracy));
  const std::string line = R"({"epoch":1,"train_loss":2,"train_accuracy":0,"test_accuracy":0,"seconds":1,"test":)";
  EXPECT_THAT(read_error(line + "7}"), Fails(Error::file));
  EXPECT_THAT(read_error(line + R"({"mae":"x"}})"), Fails(Error::file));
}

TEST_F(MetricsTest, KeepsWhatEachRankWaitedForAndTook) {
  auto history = some_history(2);
  history[1].ranks = {{0.0123456, 2.5, 3'000'000'000}, {0, std::nan(""), 0}};
  write_metrics(folder_ / "metrics.jsonl", history);
  EXPECT_THAT(folder_.read("metrics.jsonl"),
              EndsWith(R"(,"ranks":{"data_wait":[0.01235,0],"rank_wait":[2.5,null],"memory":[3000000000,0]}})"
                       "\n"));
  const auto read = read_metrics(folder_ / "metrics.jsonl");
  EXPECT_TRUE(read[0].ranks.empty());
  ASSERT_EQ(read[1].ranks.size(), 2u);
  EXPECT_EQ(read[1].ranks[0].data_wait, 0.01235);  // four digits
  EXPECT_EQ(read[1].ranks[0].rank_wait, 2.5);
  EXPECT_EQ(read[1].ranks[0].memory, 3'000'000'000);
  EXPECT_TRUE(std::isnan(read[1].ranks[1].rank_wait));
  const std::string line = R"({"epoch":1,"train_loss":2,"train_accuracy":0,"test_accuracy":0,"seconds":1,"ranks":)";
  EXPECT_THAT(read_error(line + "7}"), Fails(Error::file));
  EXPECT_THAT(read_error(line + R"({"data_wait":[0],"rank_wait":["x"],"memory":[0]}})"), Fails(Error::file));
}

TEST_F(MetricsTest, NamesTheFileAndTheLineThatIsWrong) {
  const std::string good =
      R"({"epoch":1,"train_loss":2,"train_accuracy":0.1,"test_accuracy":0.1,"seconds":1,"more":"is ignored"})"
      "\n";
  EXPECT_EQ(read_error(good), "(no error)");
  EXPECT_THAT(read_error(good + good.substr(0, 20)), Fails(Error::file));
  EXPECT_THAT(read_error(good + "\n" + good), Fails(Error::file));
  EXPECT_THAT(read_error("[1]\n"), Fails(Error::file));
  EXPECT_THAT(read_error(R"({"epoch":1.5})"), Fails(Error::file));
  EXPECT_THAT(read_error(R"({"epoch":1,"train_loss":2,"train_accuracy":0.1,"seconds":1})"), Fails(Error::file));
  EXPECT_THAT(read_error(R"({"epoch":1,"train_loss":"2"})"), Fails(Error::file));
  EXPECT_THAT(error_of([&] { read_metrics(folder_ / "nothing"); }), Fails(Error::file));
  EXPECT_THAT(error_of([&] { read_metrics(folder_.path()); }), Fails(Error::file));
}

}  // namespace metrics_test
}  // namespace lockstep
