// Labels: concurrency
// train() with larger batches: what the optimizer, the learning rate and accumulation make of a run, against a plain
// loop on one device; and what is refused.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/lab/optimizers.hpp>
#include <lockstep/models/models.hpp>
#include <lockstep/nn/weights.hpp>
#include <lockstep/trainer/trainer.hpp>
#include <nlohmann/json.hpp>

#include "support/error_of.hpp"
#include "support/small_images.hpp"
#include "support/test_devices.hpp"

#include <cmath>
#include <map>
#include <string>
#include <vector>

namespace update_test {

using lockstep::error_of;
using lockstep::LearningRate;
using lockstep::optimizer_from;
using lockstep::OptimizerKind;
using lockstep::Refused;
using lockstep::ScratchFolder;
using lockstep::TrainOptions;

constexpr int64_t samples = 150;

class Update : public testing::Test {
 protected:
  Update() { write_small_images(images_, samples, 40); }

  TrainOptions options(int ranks, const std::string& name) const {
    TrainOptions options;
    options.model.name = "mlp";
    options.model.width = 0.125;
    options.data = lockstep::FashionMnist{images_.path()};
    options.devices = lockstep::test_devices(ranks);
    options.batch.size = 32;
    options.rate.lr = 0.05;
    options.epochs = 2;
    options.keep.run_dir = runs_ / name;
    return options;
  }

  std::vector<torch::Tensor> kept(const TrainOptions& options) const {
    auto net = lockstep::make_model(options.model);
    lockstep::load_weights(options.keep.run_dir / "model.safetensors", *net);
    return net->parameters();
  }

  // The run's loop as a LibTorch user writes it for one device; `lr` of the steps already done and those of an epoch.
  std::vector<torch::Tensor> by_hand(const TrainOptions& options, int64_t batch_size, auto&& lr) const {
    const auto data = lockstep::load_fashion_mnist(images_.path());
    auto net = lockstep::make_model(options.model, options.seed);
    const auto optimizer = lockstep::make_optimizer(
        options.optimizer.kind, {net->parameters()},
        {.lr = 77, .momentum = options.optimizer.momentum, .weight_decay = options.optimizer.weight_decay});
    int64_t steps = 0;
    for (int epoch = 1; epoch <= options.epochs; ++epoch) {
      const auto all = lockstep::batches(data.train, {.size = batch_size, .seed = options.seed, .epoch = epoch});
      for (auto& batch : all) {
        optimizer->zero_grad();
        torch::nn::functional::cross_entropy(net->forward(batch.x), batch.y).backward();
        lockstep::set_learning_rate(*optimizer, lr(steps++, all.count()));
        if (options.optimizer.clip > 0) torch::nn::utils::clip_grad_norm_(net->parameters(), options.optimizer.clip);
        optimizer->step();
      }
    }
    return net->parameters();
  }

  static void expect_near(const std::vector<torch::Tensor>& weights, const std::vector<torch::Tensor>& expected) {
    ASSERT_EQ(weights.size(), expected.size());
    for (size_t i = 0; i < weights.size(); ++i) EXPECT_TRUE(torch::allclose(weights[i], expected[i], 1e-4, 1e-5)) << i;
  }

  const ScratchFolder images_;
  const ScratchFolder runs_;
};

TEST_F(Update, IsThatOfAPlainLoopOnOneDevice) {
  struct Case {
    std::string optimizer;
    double lr, momentum, weight_decay;
  };
  for (const Case& c : {Case{"sgd", 0.05, 0, 0}, Case{"sgd", 0.02, 0.9, 0.01}, Case{"adam", 1e-3, 0, 0.01},
                        Case{"adamw", 1e-3, 0, 0.1}, Case{"lars", 5, 0.9, 0.01}, Case{"lamb", 5e-3, 0, 0.1}}) {
    TrainOptions run = options(2, c.optimizer + std::to_string(c.momentum));
    SCOPED_TRACE(run.keep.run_dir.filename());
    run.optimizer.kind = optimizer_from(c.optimizer);
    run.rate.lr = c.lr;
    run.optimizer.momentum = c.momentum;
    run.optimizer.weight_decay = c.weight_decay;
    const auto result = lockstep::train(run);
    expect_near(kept(run), by_hand(run, 32, [&](int64_t, int64_t) { return c.lr; }));
    for (const auto& metrics : result.history) EXPECT_EQ(metrics.lr, c.lr);
  }
}

TEST_F(Update, ClipsAsAPlainLoopDoes) {
  TrainOptions run = options(2, "plain");
  run.optimizer.clip = 0.3;
  run.rate.lr = 0.2;
  const auto expected = by_hand(run, 32, [&](int64_t, int64_t) { return *run.rate.lr; });
  run.optimizer.clip = 0;
  EXPECT_FALSE(
      torch::allclose(by_hand(run, 32, [&](int64_t, int64_t) { return *run.rate.lr; })[0], expected[0], 1e-2, 1e-3));
  run.optimizer.clip = 0.3;
  const std::map<std::string, lockstep::ModelSplit> splits = {{"channels", {.mesh = {.tensor = 2}}},
                                                              {"layers", {.mesh = {.pipeline = 2}, .microbatches = 2}}};
  for (const std::string how : {"data", "slices", "channels", "layers"}) {
    SCOPED_TRACE(how);
    run.keep.run_dir = runs_ / how;
    run.way = how == "slices" ? lockstep::Sharded::gradients : lockstep::Sharded::nothing;
    if (splits.contains(how)) run.way = lockstep::SplitNetwork{splits.at(how)};
    lockstep::train(run);
    expect_near(kept(run), expected);
  }
}

TEST_F(Update, FollowsTheScaledRateItsWarmUpAndItsSchedule) {
  TrainOptions run = options(2, "run");
  run.batch.size = 16;
  run.batch.scale = 2;
  run.rate.scaling = LearningRate::Scaling::linear;
  run.rate.warmup_epochs = 1;
  run.rate.schedule = LearningRate::Schedule::cosine;
  run.epochs = 3;
  const auto rate = [](int64_t steps, int64_t per_epoch) {  // two epochs' cosine behind one of warm-up
    const double epochs = static_cast<double>(steps) / static_cast<double>(per_epoch);
    return epochs < 1 ? 0.05 + 0.05 * epochs : 0.1 * (1 + std::cos(std::acos(-1) * (epochs - 1) / 2)) / 2;
  };
  const auto result = lockstep::train(run);
  expect_near(kept(run), by_hand(run, 32, rate));
  const auto read = lockstep::read_metrics(run.keep.run_dir / "metrics.jsonl");
  for (int epoch = 1; epoch <= 3; ++epoch) {
    EXPECT_DOUBLE_EQ(result.history[epoch - 1].lr, rate(5 * epoch - 1, 5)) << epoch;
    EXPECT_EQ(read[epoch - 1].lr, result.history[epoch - 1].lr);
  }

  run.rate.scaling = LearningRate::Scaling::sqrt;
  run.rate.reference_batch = 2;
  run.rate.warmup_epochs = 0;
  run.rate.schedule = LearningRate::Schedule::step;
  run.rate.step_epochs = {1, 2};
  run.rate.step_factor = 0.5;
  run.keep.run_dir = runs_ / "steps";
  lockstep::train(run);
  expect_near(kept(run), by_hand(run, 32, [](int64_t steps, int64_t per_epoch) {
                return 0.05 * 4 * std::pow(0.5, static_cast<double>(steps / per_epoch));
              }));
}

TEST_F(Update, OfAnAccumulatedBatchIsThatOfTheWholeBatch) {
  TrainOptions whole = options(1, "whole");
  whole.optimizer.momentum = 0.9;
  whole.rate.lr = 0.02;
  const auto expected = lockstep::train(whole);
  const auto weights = kept(whole);
  for (const int ranks : {1, 2, 3}) {
    for (const int parts : {3, 32}) {
      TrainOptions run = options(ranks, std::to_string(ranks) + " " + std::to_string(parts));
      SCOPED_TRACE(run.keep.run_dir.filename());
      run.optimizer.momentum = whole.optimizer.momentum;
      run.rate.lr = whole.rate.lr;
      run.batch.accumulate = parts;
      const auto result = lockstep::train(run);
      for (size_t i = 0; i < 2; ++i) {
        EXPECT_NEAR(result.history[i].train_loss, expected.history[i].train_loss, 1e-4);
        EXPECT_NEAR(result.history[i].train_accuracy, expected.history[i].train_accuracy, 1.01 / samples);
      }
      expect_near(kept(run), weights);
    }
  }
}

// One rank of three has no samples, and the others one each: there is nothing to accumulate.
TEST_F(Update, OfAnAccumulatedBatchWithAnEmptyPart) {
  TrainOptions whole = options(1, "whole"), run = options(3, "run");
  whole.batch.size = run.batch.size = 2;
  whole.rate.lr = run.rate.lr = 5e-3;
  whole.epochs = run.epochs = 1;
  run.batch.accumulate = 2;
  lockstep::train(whole);
  lockstep::train(run);
  expect_near(kept(run), kept(whole));
}

TEST_F(Update, GoesWithSplitsThatLeaveLayersWhole) {
  TrainOptions whole = options(1, "whole");
  whole.optimizer.kind = OptimizerKind::lars;
  whole.rate.lr = 5;
  whole.optimizer.momentum = 0.9;
  lockstep::train(whole);
  TrainOptions pipeline = whole;
  pipeline.devices = lockstep::test_devices(2);
  pipeline.way = lockstep::SplitNetwork{{.mesh = {.pipeline = 2}, .microbatches = 2}};
  pipeline.keep.run_dir = runs_ / "pipeline";
  lockstep::train(pipeline);
  expect_near(kept(pipeline), kept(whole));

  TrainOptions slices = options(2, "slices"), plain = options(1, "plain");
  slices.batch.accumulate = 3;
  slices.way = lockstep::SplitNetwork{{.mesh = {.tensor = 2}}};
  lockstep::train(slices);
  lockstep::train(plain);
  expect_near(kept(slices), kept(plain));
}

// By slices (--zero-stage): with accumulation and parts without samples too.
TEST_F(Update, InSlicesIsThatOfTheWhole) {
  for (const std::string optimizer : {"sgd", "adam"}) {
    TrainOptions whole = options(3, optimizer);
    whole.optimizer.kind = optimizer_from(optimizer);
    whole.rate.lr = optimizer == "sgd" ? 0.02 : 1e-3;
    whole.batch.size = 37;  // 150 samples: the last batch has 2
    whole.epochs = 1;
    lockstep::train(whole);
    for (const auto& [stage, parts] : {std::pair(1, 2), std::pair(2, 3), std::pair(3, 3)}) {
      TrainOptions run = whole;
      run.way = static_cast<lockstep::Sharded>(stage);
      run.batch.accumulate = parts;
      run.keep.run_dir = runs_ / (optimizer + std::to_string(stage));
      SCOPED_TRACE(run.keep.run_dir.filename());
      lockstep::train(run);
      expect_near(kept(run), kept(whole));
    }
  }
}

// A rank of few samples has fewer parts than the others could have, so nobody has more.
TEST_F(Update, InSlicesAllRanksHaveAsManyParts) {
  TrainOptions whole = options(2, "whole");
  whole.batch.size = 16;
  whole.batch.balance = lockstep::balance_rule_from("7,1");
  whole.epochs = 1;
  lockstep::train(whole);
  for (const int stage : {2, 3}) {
    TrainOptions run = whole;
    run.way = static_cast<lockstep::Sharded>(stage);
    run.batch.accumulate = 4;
    run.keep.run_dir = runs_ / std::to_string(stage);
    SCOPED_TRACE(stage);
    lockstep::train(run);
    expect_near(kept(run), kept(whole));
  }
}

// The checkpoint has the whole optimizer.
TEST_F(Update, InSlicesGoesOnOnOtherRanksAndWhole) {
  TrainOptions whole = options(2, "whole");
  whole.optimizer.kind = OptimizerKind::adam;
  whole.rate.lr = 1e-3;
  lockstep::train(whole);
  TrainOptions first = whole;
  first.way = lockstep::Sharded::parameters;
  first.epochs = 1;
  first.keep.run_dir = runs_ / "first";
  lockstep::train(first);
  for (const auto& [ranks, stage] : {std::pair(2, 3), std::pair(3, 1), std::pair(1, 0)}) {
    TrainOptions run = whole;
    run.devices = lockstep::test_devices(ranks);
    run.way = static_cast<lockstep::Sharded>(stage);
    run.keep.resume = first.keep.run_dir;
    run.keep.run_dir = runs_ / ("resumed" + std::to_string(ranks));
    SCOPED_TRACE(run.keep.run_dir.filename());
    lockstep::train(run);
    expect_near(kept(run), kept(whole));
  }
}

TEST_F(Update, IsNoConcernOfEvaluation) {
  TrainOptions run = options(2, "run");
  run.batch.scale = 4;
  run.batch.accumulate = 100;
  run.rate.warmup_epochs = 2;
  run.rate.scaling = LearningRate::Scaling::sqrt;
  const auto result = lockstep::train(run);
  const auto score = lockstep::evaluate_run(run.keep.run_dir, {.devices = {torch::kCPU}, .batch_size = 1});
  EXPECT_DOUBLE_EQ(score.accuracy(), result.history.back().test_accuracy);
}

TEST(UpdateJson, ComesBackAsItWas) {
  TrainOptions options;
  options.batch.scale = 8;
  options.batch.accumulate = 4;
  options.optimizer.kind = OptimizerKind::lars;
  options.optimizer.momentum = 0.9;
  options.optimizer.weight_decay = 5e-4;
  options.rate.reference_batch = 128;
  options.rate.scaling = LearningRate::Scaling::sqrt;
  options.rate.warmup_epochs = 2.5;
  options.rate.schedule = LearningRate::Schedule::step;
  options.rate.step_epochs = {3, 7};
  options.rate.step_factor = 0.3;
  options.way = lockstep::Sharded::gradients;
  const auto back = lockstep::train_options_from_json(to_json(options));
  EXPECT_EQ(to_json(back), to_json(options));
  EXPECT_EQ(back.batch.scale, 8);
  EXPECT_EQ(back.batch.accumulate, 4);
  EXPECT_EQ(back.optimizer.kind, OptimizerKind::lars);
  EXPECT_EQ(back.optimizer.momentum, 0.9);
  EXPECT_EQ(back.optimizer.weight_decay, 5e-4);
  EXPECT_EQ(back.rate.reference_batch, 128);
  EXPECT_EQ(back.rate.scaling, LearningRate::Scaling::sqrt);
  EXPECT_EQ(back.rate.warmup_epochs, 2.5);
  EXPECT_EQ(back.rate.schedule, LearningRate::Schedule::step);
  EXPECT_EQ(back.rate.step_epochs, (std::vector{3, 7}));
  EXPECT_EQ(back.rate.step_factor, 0.3);
  EXPECT_EQ(std::get<lockstep::Sharded>(back.way), lockstep::Sharded::gradients);
  EXPECT_EQ(to_json(lockstep::train_options_from_json("{}")), to_json(TrainOptions()));
}

TEST(UpdateJson, NamesWhatIsWrong) {
  const auto text = [](const std::string& json) { return error_of([&] { lockstep::train_options_from_json(json); }); };
  EXPECT_THAT(text(R"({"scale_lr": "square"})"), Refused("scale_lr"));
  EXPECT_THAT(text(R"({"scale_lr": 2})"), Refused("scale_lr"));
  EXPECT_THAT(text(R"({"schedule": "warm"})"), Refused("schedule"));
  EXPECT_THAT(text(R"({"step_epochs": [1, 2.5]})"), Refused("step_epochs[1]"));
  EXPECT_THAT(text(R"({"accumulate": 1.5})"), Refused("accumulate"));
}

}  // namespace update_test
