// train() refuses options by name: values out of range, and the pairs of option_pairs.cpp. The guide has that table.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/trainer/trainer.hpp>

#include "io/read_text.hpp"
#include "support/error_of.hpp"
#include "support/small_training.hpp"
#include "trainer/option_pairs.hpp"
#include "trainer/option_table.hpp"
#include "trainer/train_options.hpp"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <functional>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace lockstep {
namespace refusals_test {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using Keys = std::vector<std::string>;

// The options that an action's Error names.
template <class Action>
Keys refused(Action&& action) {
  try {
    action();
  } catch (const Error& error) {
    EXPECT_EQ(error.cause(), Error::Cause::refused) << error.what();
    return error.options();
  }
  return {"(no error)"};
}

class Refusals : public SmallTraining {
 protected:
  // Before the first step, with nothing written.
  Keys refused_run(const std::function<void(TrainOptions&)>& change) const {
    TrainOptions options = SmallTraining::options(2, "run");
    change(options);
    const Keys keys = refused([&] { train(options); });
    EXPECT_THAT(runs_.names(), IsEmpty());
    return keys;
  }
};

TEST_F(Refusals, NameTheOptionWhoseValueIsOutOfItsRange) {
  const double nan = std::nan(""), infinite = std::numeric_limits<double>::infinity();
  for (const auto& [key, change] : std::vector<std::pair<std::string, std::function<void(TrainOptions&)>>>{
           {"batch_size", [](auto& o) { o.batch.size = 0; }},
           {"batch_size", [](auto& o) { o.batch.size = 151; }},  // the data has 150 samples
           {"batch_size", [](auto& o) { o.batch.scale = 5; }},
           {"scale_batch", [](auto& o) { o.batch.scale = 0; }},
           {"scale_batch", [](auto& o) { o.batch.scale = INT64_MAX / 16; }},
           {"accumulate", [](auto& o) { o.batch.accumulate = 0; }},
           {"accumulate", [](auto& o) { o.batch.accumulate = 33; }},
           {"grain", [](auto& o) { o.batch.grain = -1; }},
           {"grain", [](auto& o) { o.batch.grain = 0; }},
           {"grain", [](auto& o) { o.batch.grain = 33; }},
           {"check_arithmetic", [](auto& o) { o.batch.grain = Grains(8, -0.1); }},
           {"check_arithmetic", [](auto& o) { o.batch.grain = Grains(8, 1.1); }},
           {"check_arithmetic", [=](auto& o) { o.batch.grain = Grains(8, nan); }},
           {"reference_batch", [](auto& o) { o.rate.reference_batch = -1; }},
           {"threads_per_rank", [](auto& o) { o.threads_per_rank = 0; }},
           {"threads_per_rank", [](auto& o) { o.threads_per_rank = 1025; }},
           {"timeout", [](auto& o) { o.timeout = std::chrono::seconds(0); }},
           {"silence", [](auto& o) { o.silence = std::chrono::seconds(-1); }},
           {"clip", [](auto& o) { o.optimizer.clip = -1; }},
           {"clip", [=](auto& o) { o.optimizer.clip = nan; }},
           {"keep_last", [](auto& o) { o.keep.checkpoints->last = -1; }},
           {"keep_last", [](auto& o) { o.keep.checkpoints->last = 0; }},
           {"checkpoint_every", [](auto& o) { o.keep.checkpoints->every = -1; }},
           {"check_replicas", [](auto& o) { o.check_replicas = -2; }},
           {"compress_rank", [](auto& o) { o.way = PowerSgd{0}; }},
           {"compress_rank", [](auto& o) { o.way = PowerSgd{-1}; }},
           {"zero_stage", [](auto& o) { o.way = static_cast<Sharded>(4); }},
           {"sync_every", [](auto& o) { o.way = LocalSgdOptions{0}; }},
           {"outer_lr", [](auto& o) { o.way = LocalSgdOptions{2, -1}; }},
           {"outer_lr", [=](auto& o) { o.way = LocalSgdOptions{2, infinite}; }},
           {"outer_momentum", [](auto& o) {
              o.way = LocalSgdOptions{2, 1, 1};
            }}}) {
    EXPECT_THAT(refused_run(change), ElementsAre(key));
  }
  for (const auto& [keys, change] : std::vector<std::pair<Keys, std::function<void(TrainOptions&)>>>{
           {{"lr"}, [](auto& o) { o.rate.lr = -0.5; }},
           {{"epochs"}, [](auto& o) { o.epochs = 0; }},
           {{"warmup"}, [](auto& o) { o.rate.warmup_epochs = 5; }},
           {{"step_epochs", "schedule"}, [](auto& o) { o.rate.step_epochs = {1}; }},
           {{"schedule", "step_epochs"}, [](auto& o) { o.rate.schedule = LearningRate::Schedule::step; }},
           {{"momentum"}, [](auto& o) { o.optimizer.momentum = -0.5; }},
           {{"momentum", "optimizer"}, [](auto& o) { o.optimizer = {OptimizerKind::adam, 0.9}; }},
           {{"weight_decay"}, [=](auto& o) { o.optimizer.weight_decay = nan; }},
           {{"model"}, [](auto& o) { o.model.name = "vgg"; }},
           {{"model", "text"}, [](auto& o) { o.model = {.name = "gpt"}; }},
           {{"text", "model"}, [](auto& o) { o.data = TextFile{"/text"}; }},
           {{"text"}, [](auto& o) { o.data = TextFile(); }},
           {{"model", "heads"}, [](auto& o) { o.model.heads = 2; }},
           {{"split"}, [](auto& o) { o.way = SplitNetwork{{.mesh = {.pipeline = 3}}}; }}}) {
    EXPECT_EQ(refused_run(change), keys);
  }
  EXPECT_THAT(refused_run([](auto& o) { o.sync_batchnorm = true; }), ElementsAre("sync_batchnorm"));
}

// Everything that a pair is looked for in.
struct Setting {
  TrainOptions options;
  FlatOptions flat;
  Task task = {.module = [] { return torch::nn::Linear(1, 1); }, .criterion = torch::nn::functional::mse_loss};
  bool has_task = false, is_elastic = false;
};

// Makes the choices of the table, by their texts.
const std::map<std::string, std::function<void(Setting&)>> choices = {
    {"`zero_stage`", [](auto& s) { s.flat.zero_stage = 1; }},
    {"`zero_stage` 2 or 3", [](auto& s) { s.flat.zero_stage = 2; }},
    {"`zero_stage` 3", [](auto& s) { s.flat.zero_stage = 3; }},
    {"`compress`", [](auto& s) { s.flat.compress = Compression::bf16; }},
    {"`compress` powersgd", [](auto& s) { s.flat.compress = Compression::powersgd; }},
    {"`compress` other than powersgd", [](auto& s) { s.flat.compress = Compression::none; }},
    {"`compress_rank`", [](auto& s) { s.flat.compress_rank = 2; }},
    {"`sync_every`", [](auto& s) { s.flat.local.sync_every = 2; }},
    {"no `sync_every`", [](auto& s) { s.flat.local.sync_every = 0; }},
    {"`outer_lr` or `outer_momentum`", [](auto& s) { s.flat.local.outer_momentum = 0.9; }},
    {"`cuda_graph`", [](auto& s) { s.options.cuda_graph = true; }},
    {"a `split` other than by data", [](auto& s) { s.flat.split = ModelSplit{.mesh = {.pipeline = 2}}; }},
    {"a `split`", [](auto& s) { s.flat.split = ModelSplit{.mesh = {.data = 2}}; }},
    {"a `split` in microbatches", [](auto& s) { s.flat.split = ModelSplit{.mesh = {.data = 2}, .microbatches = 2}; }},
    {"a `split` by layers or in microbatches", [](auto& s) { s.flat.split = ModelSplit{.mesh = {.pipeline = 2}}; }},
    {"a `split` by channels", [](auto& s) { s.flat.split = ModelSplit{.mesh = {.tensor = 2}}; }},
    {"`accumulate`", [](auto& s) { s.options.batch.accumulate = 2; }},
    {"`grain`", [](auto& s) { s.flat.grain = 8; }},
    {"no `grain`", [](auto& s) { s.flat.grain = 0; }},
    {"`balance`",
     [](auto& s) {
       s.options.batch.balance = std::vector<double>{2, 1};
     }},
    {"`balance` auto", [](auto& s) { s.options.batch.balance = PartsBySpeed(); }},
    {"`check_arithmetic`", [](auto& s) { s.flat.grain = 8, s.flat.check_arithmetic = 0.1; }},
    {"`sync_batchnorm`", [](auto& s) { s.options.sync_batchnorm = true; }},
    {"`on_nan` skip", [](auto& s) { s.options.on_nan = OnNan::skip; }},
    {"`threads_per_rank` above 1", [](auto& s) { s.options.threads_per_rank = 2; }},
    {"`optimizer` lars or lamb", [](auto& s) { s.options.optimizer.kind = OptimizerKind::lamb; }},
    {"`dropout` or `residual_dropout`", [](auto& s) { s.options.model = {.name = "alexnet"}; }},
    {"`devices` without CUDA", [](auto& s) { s.options.devices = {torch::kCPU}; }},
    {"`precision` tf32", [](auto& s) { s.options.precision = Precision::tf32; }},
    {"`model` gpt",
     [](auto& s) {
       s.options.model = {.name = "gpt"};
       s.flat.text = "/text";
     }},
    {"a `model` of images", [](auto& s) { s.options.model = {.name = "lenet"}; }},
    {"`text`", [](auto& s) { s.flat.text = "/text"; }},
    {"no `text`", [](auto& s) { s.flat.text.clear(); }},
    {"`data` synthetic", [](auto& s) { s.flat.data = Images::synthetic; }},
    {"`data_dir`", [](auto& s) { s.flat.data_dir = "/data"; }},
    {"`memory_format` channels-last", [](auto& s) { s.options.memory_format = MemoryFormat::channels_last; }},
    {"`checkpoint_every`", [](auto& s) { s.flat.checkpoint_every = 2; }},
    {"`keep_last` 0", [](auto& s) { s.flat.keep_last = 0; }},
    {"`trace`", [](auto& s) { s.options.keep.trace = "/trace.json"; }},
    {"an elastic job", [](auto& s) { s.is_elastic = true, s.flat.grain = 8; }},
    {"Task::ema_decay", [](auto& s) { s.has_task = true, s.task.ema_decay = 0.9; }},
    {"Task::optimizer",
     [](auto& s) {
       s.has_task = true;
       s.task.optimizer = [](auto) { return nullptr; };
       s.options.rate.lr = 0.1;
     }},
    {"`optimizer`, `momentum` or `weight_decay`", [](auto& s) { s.options.optimizer.momentum = 0.9; }},
    {"no `lr`", [](auto& s) { s.options.rate.lr.reset(); }}};

TEST(RefusedPairs, AreEachRefusedByTheirKeys) {
  const auto check = [](const std::vector<const Choice*>& sides) {
    Setting setting;
    for (const Choice* side : sides) choices.at(side->text)(setting);
    check_flat(setting.flat);
    check_pairs({.options = setting.options,
                 .flat = setting.flat,
                 .task = setting.has_task ? &setting.task : nullptr,
                 .is_elastic = setting.is_elastic});
  };
  for (const OptionPair& pair : forbidden_pairs()) {
    SCOPED_TRACE(std::string(pair.one.text) + " and " + pair.other.text);
    Keys keys;
    if (pair.one.key != nullptr) keys.emplace_back(pair.one.key);
    if (pair.other.key != nullptr) keys.emplace_back(pair.other.key);
    EXPECT_EQ(refused([&] { check({&pair.one, &pair.other}); }), keys);
    EXPECT_THAT(error_of([&] {
                  check({&pair.one, &pair.other});
                }),
                HasSubstr(std::string(pair.one.text) + " and " + pair.other.text));  // others have the same keys
  }
  check({});
}

TEST(RefusedPairs, TwoWaysAreRefusedByTheirKeys) {
  const std::vector<const char*> ways = {"`zero_stage`", "`compress`", "`sync_every`", "a `split` other than by data"};
  for (size_t one = 0; one < ways.size(); ++one) {
    for (size_t other = one + 1; other < ways.size(); ++other) {
      SCOPED_TRACE(std::string(ways[one]) + " and " + ways[other]);
      Setting setting;
      choices.at(ways[one])(setting);
      choices.at(ways[other])(setting);
      const bool goes = one == 1 && other == 3;  // a split network rounds gradients
      EXPECT_EQ(refused([&] { check_flat(setting.flat); }).size(), goes ? 1u : 2u);
      if (!goes) continue;
      setting.flat.compress = Compression::powersgd;
      EXPECT_THAT(refused([&] { check_flat(setting.flat); }), ElementsAre("compress", "split"));
    }
  }
}

TEST(RefusedPairs, NameOptionsThatThereAre) {
  std::set<std::string> keys;
  const TrainOptions defaults;
  each_option(defaults, [&](const Option& option, const auto&) { keys.insert(option.key); });
  for (const OptionPair& pair : forbidden_pairs()) {
    for (const Choice& side : {pair.one, pair.other}) {
      if (side.key == nullptr) continue;
      EXPECT_TRUE(keys.contains(side.key)) << side.key;
      EXPECT_THAT(side.text, HasSubstr("`" + std::string(side.key) + "`"));
    }
  }
}

TEST_F(Refusals, TrainRefusesThePairsThatAWayCanSay) {
  EXPECT_THAT(refused_run([](auto& o) { o.way = Sharded::gradients, o.sync_batchnorm = true; }),
              ElementsAre("zero_stage", "sync_batchnorm"));
  EXPECT_THAT(refused_run([](auto& o) { o.cuda_graph = true; }), ElementsAre("cuda_graph", "devices"));
  EXPECT_THAT(refused_run([](auto& o) { o.way = SplitNetwork{{.mesh = {.pipeline = 2}}}, o.batch.accumulate = 2; }),
              ElementsAre("accumulate", "split"));
}

TEST(RefusedPairs, AFlagsHelpListsThoseOfItsOption) {
  EXPECT_EQ(remark_on_pairs("accumulate"), "not with a `split` by layers or in microbatches");
  EXPECT_EQ(remark_on_pairs("on_nan"), "`on_nan` skip not with `sync_every`, `compress` powersgd");
  EXPECT_EQ(remark_on_pairs("check_arithmetic"), "needs `grain`, not with `cuda_graph`, a `split` other than by data");
  EXPECT_EQ(remark_on_pairs("epochs"), "");
}

// If the test fails, put the table that it shows into the guide.
TEST(RefusedPairs, StandInTheGuide) {
  std::vector<std::pair<std::string, std::string>> rows;
  for (const OptionPair& pair : forbidden_pairs()) {
    auto row = std::find_if(rows.begin(), rows.end(), [&](const auto& known) { return known.first == pair.one.text; });
    if (row == rows.end()) row = rows.insert(row, {pair.one.text, ""});
    row->second += (row->second.empty() ? "" : ", ") + std::string(pair.other.text);
  }
  std::string table = "| Beside | these are refused |\n|---|---|\n";
  for (const auto& [one, others] : rows) table += "| " + one + " | " + others + " |\n";
  const auto guide = std::filesystem::path(__FILE__).parent_path() / "../../docs/guide.md";
  EXPECT_NE(io::read_text(guide).find(table), std::string::npos) << table;
}

}  // namespace refusals_test
}  // namespace lockstep
