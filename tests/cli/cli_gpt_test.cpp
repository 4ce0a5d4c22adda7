// Labels: program long
// lockstep train --model gpt: what it prints, keeps, resumes and refuses; and eval, plan and compare of it.
#include <lockstep/models/models.hpp>
#include <lockstep/plan/plan.hpp>
#include <nlohmann/json.hpp>

#include <fstream>

#include "cli_fixture.hpp"

namespace cli_gpt_test {

using lockstep::Cli;
using lockstep::Finished;
using lockstep::lines_of;
using lockstep::run_bench;
using lockstep::run_program;
using testing::AllOf;
using testing::ContainsRegex;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;
using testing::StartsWith;
using Words = std::vector<std::string>;

class CliGpt : public Cli {
 protected:
  CliGpt() {
    std::string text;
    for (int line = 0; line < 150; ++line)
      text += "and the sky was as grey as the sea on day " + std::to_string(line % 5) + ".\n";
    images_.write("text", text);
  }

  std::string text() const { return (images_ / "text").string(); }

  // Adds the flags of a network as small as it can be.
  Words with_model(Words words, const Words& more = {}) const {
    for (const char* word :
         {"--model", "gpt", "--layers", "2", "--heads", "2", "--embedding", "16", "--context", "16"}) {
      words.push_back(word);
    }
    words.insert(words.end(), more.begin(), more.end());
    return words;
  }

  Words train_gpt(const Words& more = {}) const {
    return with_model({"train", "--text", text(), "--batch-size", "48", "--devices", "2xcpu", "--epochs", "2",
                       "--optimizer", "adamw", "--lr", "0.01"},
                      more);
  }

  void expect_error(const Words& arguments, int code, const std::string& part) {
    const Finished run = run_program(arguments, surroundings());
    SCOPED_TRACE(testing::PrintToString(arguments) + ": " + run.err);
    EXPECT_EQ(run.code, code);
    EXPECT_THAT(run.err, HasSubstr(part));
    EXPECT_THAT(work_.names(), IsEmpty());
  }
};

TEST_F(CliGpt, TrainsGoesOnAndEvaluates) {
  const Finished run =
      run_program(train_gpt({"--name", "one", "--checkpoint-every", "2", "--keep-last", "99"}), surroundings());
  ASSERT_EQ(run.code, 0) << run.err;
  EXPECT_THAT(run.err, IsEmpty());
  const auto kept = metrics("one");
  ASSERT_EQ(kept.size(), 2u);
  EXPECT_LT(kept[1].test.at("perplexity"), kept[0].test.at("perplexity"));
  char line[200];
  std::snprintf(line, sizeof line, "epoch 2/2  train loss %.4f  test loss %.4f  perplexity %.3f  %.1f sec/epoch\n",
                kept[1].train_loss, kept[1].test.at("loss"), kept[1].test.at("perplexity"), kept[1].seconds);
  EXPECT_THAT(run.out, HasSubstr(line));
  std::snprintf(line, sizeof line, "perplexity: %.2f, ", kept[1].test.at("perplexity"));
  EXPECT_THAT(lines_of(run.out).back(), StartsWith(line));
  EXPECT_THAT(run.out, AllOf(HasSubstr("  model             gpt, 2 layers, 2 heads, embedding 16, context 16\n"),
                             HasSubstr(text() + ", 6750 bytes, the last 675 held out"), Not(HasSubstr("acc"))));

  const Finished resumed =
      run_program({"train", "--resume", "runs/one/checkpoints/epoch-0001-step-000002.safetensors", "--name", "two"},
                  surroundings());
  ASSERT_EQ(resumed.code, 0) << resumed.err;
  EXPECT_EQ(metrics("two")[1].weights, kept[1].weights);
  EXPECT_EQ(metrics("two")[1].train_loss, kept[1].train_loss);

  const Finished eval = run_program({"eval", "runs/one", "--devices", "3xcpu"}, surroundings());
  ASSERT_EQ(eval.code, 0) << eval.err;
  std::snprintf(line, sizeof line, "perplexity: %.4f (42 sequences), loss %.4f, weights %s",
                kept[1].test.at("perplexity"), kept[1].test.at("loss"), kept[1].weights.c_str());
  EXPECT_THAT(eval.out, StartsWith(line));
}

TEST_F(CliGpt, FollowsAPlanOfItsLayersAndHeads) {
  const lockstep::ModelOptions model{.name = "gpt", .layers = 2, .heads = 2, .embedding = 16, .context = 16};
  images_.write("plan.json",
                to_json(lockstep::Plan{.model = "gpt",
                                       .layers = lockstep::model_signature(lockstep::make_model(model)),
                                       .devices = "cpu,cpu",
                                       .batch_size = 48,
                                       .split = {.mesh = {.pipeline = 2}, .microbatches = 2, .cuts = {2}}}));
  const std::string file = (images_ / "plan.json").string();
  const Finished planned = run_program(train_gpt({"--plan", file, "--epochs", "1"}), surroundings());
  EXPECT_EQ(planned.code, 0) << planned.err;
  EXPECT_THAT(planned.out, HasSubstr("1 x 2 x 1 (data x pipeline x tensor), 1f1b, 2 microbatches, cut at 2"));
  const Finished other = run_program(train_gpt({"--plan", file, "--heads", "4"}), surroundings());
  EXPECT_THAT(other.err, AllOf(HasSubstr("2 heads"), HasSubstr("4 heads")));
}

TEST_F(CliGpt, IsPlannedAndComparedUnderEachSplit) {
  work_.write("two.json", R"({"devices": [{"count": 2}], "within": {"latency": 1e-6, "bytes_per_second": 1e9}})");
  const Finished plan = run_program(with_model({"plan", "--simulate", "two.json", "--batch-size", "16", "--seconds",
                                                "0.1", "--keep-profile", "gpt.json"}),
                                    surroundings());
  ASSERT_EQ(plan.code, 0) << plan.err;
  EXPECT_THAT(plan.out, AllOf(HasSubstr("embedding"), HasSubstr("block2"), HasSubstr("head")));
  const Finished compare =
      run_bench(with_model({"compare", "--text", text(), "--devices", "2xcpu", "--batch-size", "16", "--steps", "2",
                            "--rounds", "1", "--simulate", "two.json", "--profile", "gpt.json", "--json", "rows.json"}),
                surroundings());
  ASSERT_EQ(compare.code, 0) << compare.err;
  for (const char* scheme : {"one device", "data 2", "pipeline, 1f1b", "tensor 2"}) {
    EXPECT_THAT(compare.out, HasSubstr(scheme));
  }
  std::ifstream file(work_ / "rows.json");
  const auto schemes = nlohmann::json::parse(file).at("schemes");
  for (const auto& scheme : schemes) {
    EXPECT_NEAR(scheme.at("final_loss").get<double>(), schemes[0].at("final_loss").get<double>(), 1e-4)
        << scheme.at("name");
  }
}

TEST_F(CliGpt, RefusesWhatDoesNotGoTogether) {
  const auto gpt = [&](const Words& more) { return with_model({"train", "--devices", "2xcpu"}, more); };
  expect_error(gpt({}), 2, "--model gpt and no --text do not go together");
  expect_error(gpt({"--text", ""}), 2, "--text");
  expect_error(gpt({"--text", "missing"}), 1, "missing: No such file");
  expect_error(gpt({"--text", text(), "--context", "700"}), 1,
               "held out and must be longer than the context, 700 bytes");
  expect_error(gpt({"--text", text(), "--context", "0"}), 2, "--context: 0 is too small");
  expect_error(gpt({"--text", text(), "--heads", "3"}), 2, "3 heads do not divide an embedding of 16");
  expect_error({"train", "--text", text()}, 2, "--text and a --model of images do not go together");
  expect_error(train({"--text", text()}), 2, "--text and --data-dir do not go together");
  expect_error(train({"--layers", "2"}), 2, "lenet has no --layers; it is of gpt");
  EXPECT_THAT(run_bench(with_model({"compare"}), surroundings()).err,
              HasSubstr("gpt learns from a text; give one with --text"));
  EXPECT_THAT(run_bench({"compare", "--text", text()}, surroundings()).err, HasSubstr("--text is for --model gpt"));
  expect_error(with_model({"sweep", "--name", "s", "--text", text()}), 2, "gpt has none");
}

}  // namespace cli_gpt_test
