// Labels: long
// train() with fewer and smaller messages: what is sent and learnt, what a stopped run goes on from, what is refused.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/models/models.hpp>
#include <lockstep/trainer/trainer.hpp>

#include "data_parallel/backward_report.hpp"
#include "support/error_of.hpp"
#include "support/small_training.hpp"
#include "support/test_devices.hpp"

#include <cmath>
#include <filesystem>
#include <map>
#include <stop_token>
#include <string>
#include <vector>

namespace communication_test {

using lockstep::Compression;
using lockstep::error_of;
using lockstep::read_run_state;
using lockstep::TrainOptions;
using lockstep::TrainResult;
using testing::AllOf;
using testing::HasSubstr;

class Communication : public lockstep::SmallTraining {
 protected:
  // As train(), but stopped at the end of the second epoch and resumed on `devices` ranks.
  TrainResult train_in_two(TrainOptions options, size_t devices) const {
    train_until(options, 2);
    options.devices = lockstep::test_devices(devices);
    return go_on(options, options.keep.run_dir);
  }

  std::map<std::string, torch::Tensor> last_state(const std::string& name) const {
    std::map<std::string, torch::Tensor> state;
    for (auto& [key, tensor] : read_run_state(checkpoint(name, "epoch-0004")).tensors) state[key] = tensor;
    return state;
  }

  // How far the run's weights are from those of the run "plain", in parts of how far these went from the start.
  double astray(const std::string& name) const {
    const auto mine = last_state(name), plain = last_state("plain");
    double away = 0, gone = 0;
    for (const auto& item : lockstep::make_model({.name = "mlp", .width = 0.125}, /*seed=*/1)->named_parameters()) {
      const auto& weight = plain.at("model." + item.key());
      away += (mine.at("model." + item.key()) - weight).square().sum().item<double>();
      gone += (weight - item.value().detach()).square().sum().item<double>();
    }
    return std::sqrt(away / gone);
  }
};

TEST_F(Communication, CompressedGradientsSendLessAndLearnAsMuch) {
  const TrainResult plain = lockstep::train(options(2, "plain"));
  int64_t parameters = 0;
  size_t tensors = 0;
  for (const auto& [key, tensor] : last_state("plain")) {
    if (!key.starts_with("model.")) continue;
    parameters += tensor.numel();
    ++tensors;
  }
  const auto report = 8.0 * static_cast<double>(lockstep::BackwardReport::size(tensors, 2));
  const double bytes = plain.history[1].bytes_per_step - report;
  EXPECT_DOUBLE_EQ(bytes, 4.0 * static_cast<double>(parameters));  // 2 (k - 1) / k of them, among 2
  for (const auto& [compress, most] :
       std::map<std::string, double>{{"bf16", 0.05}, {"fp16", 1e-3}, {"powersgd", 0.2}}) {
    SCOPED_TRACE(compress);
    TrainOptions run = options(2, compress);
    run.exchange.compress = lockstep::compression_from(compress);
    const TrainResult result = lockstep::train(run);
    EXPECT_LT(astray(compress), most);
    EXPECT_NE(result.history[3].train_loss, plain.history[3].train_loss);
    if (compress == "powersgd") {
      EXPECT_LT(result.history[1].bytes_per_step - report, bytes / 3);
    } else {
      EXPECT_DOUBLE_EQ(result.history[1].bytes_per_step - report, bytes / 2);
    }
  }
}

TEST_F(Communication, StepsBetweenAveragesSendNothing) {
  const TrainResult plain = lockstep::train(options(2, "plain"));
  TrainOptions run = options(2, "local");
  run.exchange.sync_every = 3;  // the last round of an epoch has two steps
  const TrainResult local = lockstep::train(run);
  // The parameters, without the report that gradients bring along.
  EXPECT_LT(local.history[1].bytes_per_step, 2 * plain.history[1].bytes_per_step / 5);
  EXPECT_NEAR(local.history[1].bytes_per_step, 2 * plain.history[1].bytes_per_step / 5, 100);
  EXPECT_LT(astray("local"), 0.2);
  TrainOptions every = options(2, "every");
  every.exchange.sync_every = 1;
  EXPECT_NEAR(lockstep::train(every).history[3].train_loss, plain.history[3].train_loss, 1e-5);
  for (const auto& [key, tensor] : last_state("plain")) {
    if (!key.starts_with("model.")) continue;
    EXPECT_TRUE(torch::allclose(last_state("every").at(key), tensor, 1e-4, 1e-6)) << key;
  }
}

TEST_F(Communication, AStoppedRunGoesOnWithTheSameBits) {
  const auto with = [&](const std::string& how, const std::string& name) {
    TrainOptions run = options(3, name);
    run.optimizer.momentum = 0.5;
    if (how == "powersgd") run.exchange.compress = Compression::powersgd, run.exchange.compress_rank = 2;
    if (how == "diloco") run.exchange.sync_every = 2, run.exchange.outer_lr = 0.7, run.exchange.outer_momentum = 0.9;
    return run;
  };
  for (const std::string how : {"powersgd", "diloco"}) {
    SCOPED_TRACE(how);
    const TrainResult whole = lockstep::train(with(how, "whole-" + how));
    const TrainResult result = train_in_two(with(how, "stopped-" + how), 3);
    EXPECT_EQ(result.history.at(3).train_loss, whole.history[3].train_loss);
    expect_same_bits("stopped-" + how, "whole-" + how);
  }
  EXPECT_EQ(last_state("whole-powersgd").lower_bound("ranks.error.")->second.size(0), 3);

  // Other ranks: the mean of what was left out; each rank's own momentum cannot be had.
  const TrainResult on_two = train_in_two(with("powersgd", "on-two"), 2);
  EXPECT_NEAR(on_two.history[3].train_loss,
              lockstep::read_metrics(runs_ / "whole-powersgd/metrics.jsonl")[3].train_loss, 1e-3);
  EXPECT_THAT(error_of([&] { train_in_two(with("diloco", "refused"), 2); }),
              AllOf(HasSubstr("`sync_every`"), HasSubstr("the run had 3 ranks, this one has 2")));
}

// Within a round the ranks differ. Steps of a wide network take long enough to be reported within an epoch.
TEST_F(Communication, AStopWithinAnEpochKeepsTheRoundsEndAndGoesOnWithTheSameBits) {
  const auto with = [&](const std::string& name) {
    TrainOptions run = options(2, name);
    run.model.width = 1;
    run.batch.size = 2;
    run.exchange.sync_every = 7, run.exchange.outer_lr = 0.7, run.exchange.outer_momentum = 0.9;
    return run;
  };
  lockstep::train(with("whole"));
  std::stop_source stop;
  lockstep::TrainCallbacks callbacks;
  callbacks.on_step = [&](const auto&) { stop.request_stop(); };
  callbacks.stop = stop.get_token();
  EXPECT_TRUE(lockstep::train(with("stopped"), callbacks).stopped);
  std::vector<std::filesystem::path> kept;
  for (const auto& entry : std::filesystem::directory_iterator(runs_ / "stopped/checkpoints")) {
    if (entry.path().extension() == ".safetensors") kept.push_back(entry.path());
  }
  ASSERT_EQ(kept.size(), 1u);
  const auto state = read_run_state(kept[0]);
  EXPECT_EQ(state.epochs, 0);
  EXPECT_GT(state.steps, 0);
  EXPECT_EQ(state.steps % 7, 0);
  go_on(with("stopped"), runs_ / "stopped");
  expect_same_bits("stopped", "whole");
}

TEST_F(Communication, WhatMakesNoSenseIsRefusedWithNothingWritten) {
  const auto refused = [&](auto change) {
    TrainOptions run = options(2, "run");
    change(run);
    const auto text = error_of([&] { lockstep::train(run); });
    EXPECT_THAT(runs_.names(), testing::IsEmpty()) << text;
    return text;
  };
  EXPECT_THAT(refused([](auto& o) { o.exchange.compress_rank = 2; }), HasSubstr("`compress_rank` goes with"));
  EXPECT_THAT(refused([](auto& o) { o.exchange.compress = Compression::powersgd, o.exchange.compress_rank = -1; }),
              HasSubstr("is -1"));
  EXPECT_THAT(refused([](auto& o) { o.exchange.sync_every = -1; }), HasSubstr("(`sync_every`) is -1"));
  EXPECT_THAT(refused([](auto& o) { o.exchange.outer_lr = 0.7; }), HasSubstr("what `sync_every` does"));
  EXPECT_THAT(refused([](auto& o) { o.exchange.sync_every = 2, o.exchange.outer_lr = -1; }),
              HasSubstr("(`outer_lr`) is -1"));
  EXPECT_THAT(refused([](auto& o) { o.exchange.sync_every = 2, o.exchange.outer_momentum = 1; }),
              HasSubstr("(`outer_momentum`) is 1"));
  EXPECT_THAT(refused([](auto& o) { o.exchange.sync_every = 2, o.exchange.compress = Compression::bf16; }),
              HasSubstr("`compress`"));
  EXPECT_THAT(refused([](auto& o) { o.exchange.sync_every = 2, o.keep.every = 2; }), HasSubstr("`checkpoint_every`"));
  EXPECT_THAT(refused([](auto& o) { o.exchange.sync_every = 2, o.model.name = "resnet18", o.sync_batchnorm = true; }),
              HasSubstr("`sync_batchnorm`"));
  for (const auto& split :
       {lockstep::ModelSplit{.mesh = {.pipeline = 2}}, lockstep::ModelSplit{.mesh = {.tensor = 2}}}) {
    EXPECT_THAT(refused([&](auto& o) { o.exchange.compress = Compression::powersgd, o.split = split; }),
                HasSubstr("not by data alone"));
    EXPECT_THAT(refused([&](auto& o) { o.exchange.sync_every = 2, o.split = split; }), HasSubstr("not by data alone"));
  }
}

TEST_F(Communication, SixteenBitsGoWithEverySplitAndWithAccumulation) {
  TrainOptions run = options(4, "run");
  run.exchange.compress = Compression::bf16;
  run.epochs = 1;
  run.split = lockstep::ModelSplit{.mesh = {.data = 2, .pipeline = 2}, .microbatches = 2};
  const double loss = lockstep::train(run).history[0].train_loss;
  TrainOptions parts = options(2, "parts");
  parts.exchange.compress = Compression::bf16;
  parts.epochs = 1;
  parts.batch.accumulate = 2;
  EXPECT_NEAR(lockstep::train(parts).history[0].train_loss, loss, 1e-3);
}

TEST(CommunicationJson, ComesBackAsItWas) {
  TrainOptions options;
  options.exchange.compress = Compression::powersgd;
  options.exchange.compress_rank = 3;
  options.exchange.sync_every = 16;
  options.exchange.outer_lr = 0.7;
  options.exchange.outer_momentum = 0.9;
  const auto back = lockstep::train_options_from_json(to_json(options));
  EXPECT_EQ(back.exchange.compress, Compression::powersgd);
  EXPECT_EQ(back.exchange.compress_rank, 3);
  EXPECT_EQ(back.exchange.sync_every, 16);
  EXPECT_EQ(back.exchange.outer_lr, 0.7);
  EXPECT_EQ(back.exchange.outer_momentum, 0.9);
}

}  // namespace communication_test
