// Labels: long
// train() with fewer and smaller messages: what is sent and learnt, and what a stopped run goes on from.
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

using lockstep::error_of;
using lockstep::read_run_state;
using lockstep::Refused;
using lockstep::TrainOptions;
using lockstep::TrainResult;

class Communication : public lockstep::SmallTraining {
 protected:
  // Trains as train() does, but stops at the end of the second epoch and resumes on `devices` ranks.
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
    if (compress == "powersgd") run.way = lockstep::PowerSgd();
    if (compress == "bf16") run.way = lockstep::Averaged{lockstep::Rounding::bf16};
    if (compress == "fp16") run.way = lockstep::Averaged{lockstep::Rounding::fp16};
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
  run.way = lockstep::LocalSgdOptions{3};  // the last round of an epoch has two steps
  const TrainResult local = lockstep::train(run);
  // The parameters, without the report that gradients bring along.
  EXPECT_LT(local.history[1].bytes_per_step, 2 * plain.history[1].bytes_per_step / 5);
  EXPECT_NEAR(local.history[1].bytes_per_step, 2 * plain.history[1].bytes_per_step / 5, 100);
  EXPECT_LT(astray("local"), 0.2);
  TrainOptions every = options(2, "every");
  every.way = lockstep::LocalSgdOptions{1};
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
    if (how == "powersgd") run.way = lockstep::PowerSgd{2};
    if (how == "diloco") run.way = lockstep::LocalSgdOptions{2, 0.7, 0.9};
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
  EXPECT_THAT(error_of([&] { train_in_two(with("diloco", "refused"), 2); }), Refused("devices"));
}

// Within a round the ranks differ. Steps of a wide network take long enough to be reported within an epoch.
TEST_F(Communication, AStopWithinAnEpochKeepsTheRoundsEndAndGoesOnWithTheSameBits) {
  const auto with = [&](const std::string& name) {
    TrainOptions run = options(2, name);
    run.model.width = 1;
    run.batch.size = 2;
    run.way = lockstep::LocalSgdOptions{7, 0.7, 0.9};
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

TEST_F(Communication, SixteenBitsGoWithEverySplitAndWithAccumulation) {
  TrainOptions run = options(4, "run");
  run.epochs = 1;
  run.way = lockstep::SplitNetwork{{.mesh = {.data = 2, .pipeline = 2}, .microbatches = 2}, lockstep::Rounding::bf16};
  const double loss = lockstep::train(run).history[0].train_loss;
  TrainOptions parts = options(2, "parts");
  parts.way = lockstep::Averaged{lockstep::Rounding::bf16};
  parts.epochs = 1;
  parts.batch.accumulate = 2;
  EXPECT_NEAR(lockstep::train(parts).history[0].train_loss, loss, 1e-3);
}

}  // namespace communication_test
