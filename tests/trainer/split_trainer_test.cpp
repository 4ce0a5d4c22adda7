// Labels: concurrency
// Not under sanitizers: SplitTrainer.Learns*
// train() with a split: what a run by data alone learns, a network split by layers and channels learns too, and keeps.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/models/models.hpp>
#include <lockstep/nn/weights.hpp>
#include <lockstep/trainer/trainer.hpp>

#include "support/error_of.hpp"
#include "support/small_images.hpp"
#include "support/test_devices.hpp"

#include <string>
#include <vector>

namespace split_trainer_test {

using lockstep::error_of;
using lockstep::ModelOptions;
using lockstep::ModelSplit;
using lockstep::PipelineSchedule;
using lockstep::Refused;
using lockstep::ScratchFolder;
using lockstep::TrainOptions;
using lockstep::TrainResult;

constexpr int64_t samples = 150, test_samples = 40;

class SplitTrainer : public testing::Test {
 protected:
  SplitTrainer() { write_small_images(images_, samples, test_samples); }

  // A run in runs_ / name, on as many CPU ranks as the split has.
  TrainOptions options(const ModelOptions& model, const ModelSplit& split, const std::string& name) const {
    TrainOptions options;
    options.model = model;
    options.data = lockstep::FashionMnist{images_.path()};
    options.devices = lockstep::test_devices(split.mesh.size());
    options.way = lockstep::SplitNetwork{split};
    options.batch.size = 32;
    options.rate.lr = 0.05;
    options.epochs = 2;
    options.keep.run_dir = runs_ / name;
    return options;
  }

  torch::nn::Sequential kept(const ModelOptions& model, const std::string& name) const {
    auto net = make_model(model);
    lockstep::load_weights(runs_ / name / "model.safetensors", *net);
    return net;
  }

  void expect_evaluates_to(const TrainResult& result, const std::string& name) const {
    const auto score = lockstep::evaluate_run(runs_ / name, {.devices = {torch::kCPU}});
    EXPECT_DOUBLE_EQ(score.accuracy(), result.history.back().test_accuracy);
  }

  const ScratchFolder images_;
  const ScratchFolder runs_;
};

const ModelOptions mlp{.name = "mlp", .width = 0.125};
const ModelOptions alexnet{.name = "alexnet", .width = 0.05, .image_size = 65};
const ModelOptions resnet{.name = "resnet18", .width = 0.05};

TEST_F(SplitTrainer, LearnsWhatARunByDataAloneLearns) {
  TrainOptions by_data = options(mlp, {.mesh = {.data = 2}}, "data");
  by_data.way = lockstep::Averaged();
  const auto expected = lockstep::train(by_data);
  const auto weights = kept(mlp, "data")->named_parameters();
  const std::vector<ModelSplit> splits = {
      {.mesh = {.data = 2}},
      {.mesh = {.pipeline = 2}},
      {.mesh = {.tensor = 2}},
      {.mesh = {.pipeline = 2}, .schedule = PipelineSchedule::gpipe, .microbatches = 3, .recompute = true, .cuts = {5}},
      {.mesh = {.pipeline = 2}, .schedule = PipelineSchedule::interleaved, .stages_per_rank = 2, .microbatches = 4},
      {.mesh = {.data = 2}, .microbatches = 2},
      {.mesh = {.data = 2, .pipeline = 2}, .microbatches = 2},
      {.mesh = {.data = 2, .tensor = 2}},
      {.mesh = {.pipeline = 2, .tensor = 2}, .microbatches = 2}};
  for (size_t s = 0; s < splits.size(); ++s) {
    SCOPED_TRACE(to_string(splits[s]));
    const std::string name = std::to_string(s);
    const auto result = lockstep::train(options(mlp, splits[s], name));
    for (size_t i = 0; i < 2; ++i) {
      EXPECT_NEAR(result.history[i].train_loss, expected.history[i].train_loss, 1e-4);
      EXPECT_NEAR(result.history[i].train_accuracy, expected.history[i].train_accuracy, 1.01 / samples);
      EXPECT_NEAR(result.history[i].test_accuracy, expected.history[i].test_accuracy, 1.01 / test_samples);
    }
    const auto mine = kept(mlp, name)->named_parameters();
    for (const auto& item : weights) {
      EXPECT_TRUE(torch::allclose(mine[item.key()], item.value(), 1e-4, 1e-5)) << item.key();
    }
    expect_evaluates_to(result, name);
  }
}

TEST_F(SplitTrainer, TrainsTheSameBitsTwice) {
  const ModelSplit split{.mesh = {.data = 2, .pipeline = 2}, .microbatches = 2};
  const auto first = lockstep::train(options(mlp, split, "1")), second = lockstep::train(options(mlp, split, "2"));
  EXPECT_EQ(runs_.read("1/model.safetensors"), runs_.read("2/model.safetensors"));
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(first.history[i].train_loss, second.history[i].train_loss);
    EXPECT_EQ(first.history[i].train_accuracy, second.history[i].train_accuracy);
    EXPECT_EQ(first.history[i].test_accuracy, second.history[i].test_accuracy);
  }
}

TEST_F(SplitTrainer, KeepsOneNetworkWithItsRunningStatistics) {
  for (const ModelSplit& split : {ModelSplit{.mesh = {.data = 2, .pipeline = 2}, .microbatches = 2},
                                  ModelSplit{.mesh = {.data = 2, .tensor = 2}}}) {
    SCOPED_TRACE(to_string(split));
    const auto result = lockstep::train(options(resnet, split, to_string(split)));
    EXPECT_LT(result.history[1].train_loss, result.history[0].train_loss);
    const auto trained = kept(resnet, to_string(split))->buffers(), untrained = make_model(resnet)->buffers();
    for (size_t i = 0; i < trained.size(); ++i) EXPECT_FALSE(torch::equal(trained[i], untrained[i])) << i;
    expect_evaluates_to(result, to_string(split));
  }
}

TEST_F(SplitTrainer, TrainsInBfloat16AndChannelsLastNearlyTheSame) {
  TrainOptions whole = options(alexnet, {}, "whole");
  whole.epochs = 1;
  whole.rate.lr = 1e-3;  // a larger one carries rounding from step to step
  whole.memory_format = lockstep::MemoryFormat::contiguous;
  const auto expected = lockstep::train(whole).history[0].train_loss;
  for (const ModelSplit& split :
       {ModelSplit{.mesh = {.pipeline = 2}, .microbatches = 2}, ModelSplit{.mesh = {.tensor = 2}}}) {
    SCOPED_TRACE(to_string(split));
    TrainOptions settings = options(alexnet, split, to_string(split) + " last");
    settings.epochs = 1;
    settings.rate.lr = whole.rate.lr;
    settings.memory_format = lockstep::MemoryFormat::channels_last;
    const auto unrounded = lockstep::train(settings).history[0].train_loss;
    EXPECT_NEAR(unrounded, expected, 1e-3);
    settings.precision = lockstep::Precision::bf16;
    settings.keep.run_dir = runs_ / (to_string(split) + " bf16");
    const auto rounded = lockstep::train(settings);
    EXPECT_NEAR(rounded.history[0].train_loss, expected, 0.1);
    EXPECT_NE(rounded.history[0].train_loss, unrounded);
    const auto score = lockstep::evaluate_run(settings.keep.run_dir, {.devices = {torch::kCPU}});
    EXPECT_NEAR(score.accuracy(), rounded.history[0].test_accuracy, 2.01 / test_samples);  // sums are rounded elsewhere
  }
}

TEST_F(SplitTrainer, ShowsTheLossOfRank0sSamples) {
  TrainOptions settings = options(mlp, {.mesh = {.pipeline = 2}, .microbatches = 2}, "run");
  double shown = 0;
  lockstep::TrainCallbacks callbacks;
  callbacks.on_step = [&](const lockstep::StepProgress& progress) { shown = progress.loss; };
  const auto result = lockstep::train(settings, callbacks);
  EXPECT_NEAR(shown, result.history[1].train_loss, 1e-12);  // all samples are rank 0's
}

TEST_F(SplitTrainer, ARequestToStopKeepsTheFinishedEpochs) {
  TrainOptions settings = options(mlp, {.mesh = {.pipeline = 2, .tensor = 2}}, "run");
  settings.epochs = 1000;
  std::stop_source stop;
  lockstep::TrainCallbacks callbacks;
  callbacks.stop = stop.get_token();
  callbacks.on_epoch = [&](const lockstep::EpochMetrics&) { stop.request_stop(); };
  const auto result = lockstep::train(settings, callbacks);
  EXPECT_TRUE(result.stopped);
  EXPECT_EQ(result.history.size(), 1u);
  EXPECT_EQ(lockstep::read_metrics(settings.keep.run_dir / "metrics.jsonl").size(), 1u);
}

TEST_F(SplitTrainer, WhatDoesNotFitIsRefusedWithNothingWritten) {
  const auto refused = [&](int ranks, const ModelSplit& split) {
    TrainOptions settings = options({.name = "lenet"}, split, "run");
    settings.devices = lockstep::test_devices(ranks);
    const auto text = error_of([&] { lockstep::train(settings); });
    EXPECT_THAT(runs_.names(), testing::IsEmpty()) << text;
    return text;
  };
  EXPECT_THAT(refused(2, {.mesh = {.pipeline = 3}}), Refused("split"));
  EXPECT_THAT(refused(7, {.mesh = {.pipeline = 7}}), Refused("split"));
  EXPECT_THAT(refused(2, {.mesh = {.pipeline = 2}, .cuts = {6}}), Refused("split"));
  EXPECT_THAT(refused(3, {.mesh = {.tensor = 3}}), Refused());  // its first layer has 20 channels
}

}  // namespace split_trainer_test
