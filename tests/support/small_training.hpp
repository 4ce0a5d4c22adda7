// SmallTraining: a fixture for tests of train() on a small image set, with runs in a folder of its own.
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <lockstep/trainer/trainer.hpp>

#include "small_images.hpp"
#include "test_devices.hpp"
#include "trainer/run_state.hpp"

#include <cstdlib>
#include <filesystem>
#include <stop_token>
#include <string>

namespace lockstep {

class SmallTraining : public testing::Test {
 protected:
  explicit SmallTraining(int64_t samples = 150) { write_small_images(images_, samples, 40); }

  // With 150 samples: four epochs of five steps.
  TrainOptions options(int ranks, const std::string& name) const {
    TrainOptions options;
    options.data = FashionMnist{images_.path()};
    options.devices = test_devices(ranks);
    options.model.name = "mlp";
    options.model.width = 0.125;
    options.batch.size = 32;
    options.rate.lr = 0.05;
    options.epochs = 4;
    options.keep.run_dir = runs_ / name;
    return options;
  }

  // Trains as train() does, but a request to stop comes at the end of that epoch.
  static TrainResult train_until(const TrainOptions& options, int epoch) {
    std::stop_source stop;
    TrainCallbacks callbacks;
    callbacks.stop = stop.get_token();
    callbacks.on_epoch = [&](const EpochMetrics& metrics) {
      if (metrics.epoch == epoch) stop.request_stop();
    };
    const auto result = train(options, callbacks);
    EXPECT_TRUE(result.stopped);
    return result;
  }

  static TrainResult go_on(TrainOptions options, const std::filesystem::path& from) {
    options.keep.resume = from;
    return train(options);
  }

  std::filesystem::path checkpoint(const std::string& name, const std::string& position) const {
    return runs_ / name / "checkpoints" / (position + ".safetensors");
  }

  static void expect_same(const TrainResult& result, const TrainResult& expected) {
    ASSERT_EQ(result.history.size(), expected.history.size());
    for (size_t i = 0; i < result.history.size(); ++i) {
      EXPECT_EQ(result.history[i].epoch, static_cast<int>(i) + 1);
      EXPECT_EQ(result.history[i].train_loss, expected.history[i].train_loss);
      EXPECT_EQ(result.history[i].train_accuracy, expected.history[i].train_accuracy);
      EXPECT_EQ(result.history[i].test_accuracy, expected.history[i].test_accuracy);
    }
  }

  // The whole networks, with their running statistics, and what else the last checkpoints hold.
  void expect_same_bits(const std::string& name, const std::string& expected) const {
    EXPECT_EQ(runs_.read(name + "/model.safetensors"), runs_.read(expected + "/model.safetensors"));
    const auto mine = read_run_state(checkpoint(name, "epoch-0004")).tensors;
    const auto theirs = read_run_state(checkpoint(expected, "epoch-0004")).tensors;
    ASSERT_EQ(mine.size(), theirs.size());
    for (size_t i = 0; i < mine.size(); ++i) {
      EXPECT_EQ(mine[i].first, theirs[i].first);
      if (mine[i].first != "ranks.rng") EXPECT_TRUE(torch::equal(mine[i].second, theirs[i].second)) << mine[i].first;
    }
  }

  const ScratchFolder images_;
  const ScratchFolder runs_;
};

}  // namespace lockstep
