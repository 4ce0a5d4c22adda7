#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <lockstep/nn/tensor_files.hpp>
#include <lockstep/trainer/metrics.hpp>
#include <lockstep/trainer/report.hpp>

#include "support/error_of.hpp"
#include "support/report_data.hpp"
#include "support/scratch_folder.hpp"
#include "trainer/run_notes.hpp"

#include <algorithm>
#include <cmath>

namespace lockstep {
namespace report_test {

using nlohmann::json;
namespace fs = std::filesystem;

class ReportTest : public testing::Test {
 protected:
  fs::path run(const fs::path& name, int epochs = 2) {
    const fs::path folder = folder_ / name;
    fs::create_directories(folder);
    std::vector<EpochMetrics> history;
    for (int epoch = 1; epoch <= epochs; ++epoch)
      history.push_back({.epoch = epoch, .train_loss = 1.0 / epoch, .seconds = 1, .test = {{"mae", 0.5}}});
    write_metrics(folder / "metrics.jsonl", history);
    return folder;
  }
  ReportData report(const std::vector<fs::path>& runs) {
    write_report(folder_ / "report.html", runs);
    return ReportData(folder_ / "report.html");
  }
  ScratchFolder folder_;
};

TEST_F(ReportTest, HasTheRunsFilesAsTheyAre) {
  const fs::path folder = run("a");
  folder_.write("a/config.json", R"({"model": "lenet", "lr": 0.3, "way": {"zero_stage": 2}})");
  folder_.write("a/notes.json", R"({"warnings": ["mind this"]})");
  save_tensors(folder / "model.safetensors", {{"fc.weight", torch::zeros({3, 4})}});
  const ReportData made = report({folder});
  EXPECT_EQ(made.run()["name"], "a");
  EXPECT_EQ(made.run()["config"]["way"]["zero_stage"], 2);
  EXPECT_EQ(made.run()["notes"]["warnings"][0], "mind this");
  EXPECT_EQ(made.run()["metrics"][1]["train_loss"], 0.5);
  EXPECT_EQ(made.run()["metrics"][1]["test"]["mae"], 0.5);
  EXPECT_EQ(made.run()["shapes"]["fc.weight"], (std::vector<int>{3, 4}));
  const auto& settings = made.all()["settings"];
  EXPECT_NE(std::find(settings.begin(), settings.end(), json({"Batches and updates", "batch_size", "256"})),
            settings.end());
}

TEST_F(ReportTest, MetricsAloneAreEnough) {
  const fs::path folder = run("a");
  folder_.write("a/config.json", "{");
  folder_.write("a/notes.json", "[]");
  folder_.write("a/model.safetensors", "short");
  const ReportData made = report({folder});
  EXPECT_TRUE(made.run()["config"].is_null() && made.run()["notes"].is_null() && made.run()["shapes"].empty());
}

TEST_F(ReportTest, AFolderStandsForTheRunsInIt) {
  run("runs/b");
  run("runs/a");
  folder_.write("runs/table.txt", "no run");
  const ReportData made = report({folder_ / "runs", run("other/a")});
  ASSERT_EQ(made.all()["runs"].size(), 3u);
  EXPECT_EQ(made.run(0)["name"], "a");
  EXPECT_EQ(made.run(1)["name"], "b");
  EXPECT_EQ(made.run(2)["name"], (folder_ / "other/a").string());  // the name is taken
}

// In HTML "</script" ends a script, and "<!--<script" keeps one from ending.
TEST_F(ReportTest, NoTextOfARunIsMarkup) {
  const std::string evil = "</script><script>alert(1)</script><!--<script>{{data}}{{style}}&\"'`";
  const fs::path folder = run("</script><script>alert(1)");
  folder_.write("</script><script>alert(1)/notes.json", json({{"title", evil}, {"warnings", {evil}}}).dump());
  folder_.write("</script><script>alert(1)/config.json", json({{"model", evil}}).dump());
  const ReportData made = report({folder});
  EXPECT_EQ(made.run()["notes"]["title"], evil);
  EXPECT_EQ(made.run()["config"]["model"], evil);
  EXPECT_EQ(made.run()["name"], "script><script>alert(1)");
  const ReportData harmless = report({run("a")});
  const auto count = [](const std::string& text, const std::string& part) {
    int found = 0;
    for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++found;
    return found;
  };
  for (const char* mark : {"<", "</script", "<!--"}) EXPECT_EQ(count(made.page(), mark), count(harmless.page(), mark));
}

TEST_F(ReportTest, ReadsAPathThatIsNotUtf8) {
  EXPECT_EQ(report({run("a\xff")}).run()["name"], "a\xEF\xBF\xBD");
}

TEST_F(ReportTest, RefusesWhatIsNoRun) {
  fs::create_directories(folder_ / "empty");
  fs::create_directories(folder_ / "damaged");
  folder_.write("empty/a file", "");
  for (const auto& no_run : {folder_ / "empty", folder_ / "not there", folder_ / "empty/a file"})
    EXPECT_THAT(error_of([&] { report({no_run}); }), Fails(Error::file, {}, {"run_dir"}));
  folder_.write("damaged/metrics.jsonl", R"({"epoch":1})");
  EXPECT_THAT(error_of([&] { report({folder_ / "damaged"}); }), Fails(Error::file));
  const fs::path good = run("a");
  EXPECT_THAT(error_of([&] { write_report(folder_ / "no/report.html", {good}); }), Fails(Error::file));
}

TEST(RunNotesTest, AreThoseOfTheWholeRunWhenItGoesOn) {
  const ScratchFolder folder;
  folder.write("notes.json", R"({"warnings": ["first", "both"], "timeline": 7, "title": "old"})");
  folder.write("damaged.json", R"({"warnings": 3)");
  RunNotes notes;
  notes.set("title", "new");
  notes.warn("both");
  notes.warn("before");
  notes.take(folder / "notes.json");
  notes.take(folder / "damaged.json");
  notes.take(folder / "not there");
  notes.warn("last");
  notes.warn("last");
  const json all = json::parse(notes.text());
  EXPECT_EQ(all["warnings"], (std::vector<std::string>{"first", "both", "before", "last"}));
  EXPECT_EQ(all["timeline"], 7);
  EXPECT_EQ(all["title"], "new");
}

}  // namespace report_test
}  // namespace lockstep
