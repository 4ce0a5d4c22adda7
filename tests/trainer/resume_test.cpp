// Labels: long
// A run that was stopped and goes on gives the same bits as one that was not; and what cannot go on is refused.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/models/models.hpp>
#include <lockstep/nn/weights.hpp>
#include <lockstep/trainer/trainer.hpp>
#include <nlohmann/json.hpp>

#include "io/digest.hpp"
#include "support/error_of.hpp"
#include "support/small_training.hpp"

#include <algorithm>
#include <fstream>
#include <string>
#include <vector>

namespace resume_test {

namespace fs = std::filesystem;
using lockstep::EpochMetrics;
using lockstep::Error;
using lockstep::error_of;
using lockstep::Fails;
using lockstep::ModelSplit;
using lockstep::read_run_state;
using lockstep::Refused;
using lockstep::TrainOptions;
using lockstep::TrainResult;
using testing::AllOf;
using testing::HasSubstr;

void swap_files(const fs::path& a, const fs::path& b) {
  const fs::path between = a.string() + ".swapped";
  fs::rename(a, between);
  fs::rename(b, a);
  fs::rename(between, b);
}

class Resume : public lockstep::SmallTraining {
 protected:
  void expect_near(const std::string& name, const std::string& expected) const {
    const auto mine = read_run_state(checkpoint(name, "epoch-0004")).tensors;
    for (const auto& [key, tensor] : read_run_state(checkpoint(expected, "epoch-0004")).tensors) {
      if (!key.starts_with("model.")) continue;
      const auto same =
          std::find_if(mine.begin(), mine.end(), [&key = key](auto& entry) { return entry.first == key; });
      ASSERT_NE(same, mine.end());
      EXPECT_TRUE(torch::allclose(same->second, tensor, 1e-4, 1e-5)) << key;
    }
  }
};

TEST_F(Resume, AStoppedRunGoesOnWithTheSameBits) {
  for (const std::string model : {"mlp", "resnet18"}) {
    for (const int ranks : {1, 2, 3, 4}) {
      if (model == "resnet18" && ranks != 2) continue;  // for its running statistics
      SCOPED_TRACE(model + " on " + std::to_string(ranks));
      const auto in = [&](const std::string& name) {
        TrainOptions settings = options(ranks, name + model + std::to_string(ranks));
        settings.model.name = model;
        settings.model.width = model == "mlp" ? 0.125 : 0.05;
        return settings;
      };
      const TrainResult expected = lockstep::train(in("whole"));
      EXPECT_EQ(train_until(in("stopped"), 2).history.size(), 2u);
      const TrainResult result = go_on(in("stopped"), in("stopped").keep.run_dir);
      EXPECT_FALSE(result.stopped);
      expect_same(result, expected);
      expect_same_bits("stopped" + model + std::to_string(ranks), "whole" + model + std::to_string(ranks));
      EXPECT_EQ(lockstep::read_metrics(in("stopped").keep.run_dir / "metrics.jsonl").size(), 4u);
    }
  }
}

TEST_F(Resume, WithTheOptimizersState) {
  for (const char* optimizer : {"sgd", "adam", "lamb"}) {
    SCOPED_TRACE(optimizer);
    TrainOptions with = options(2, std::string("whole-") + optimizer);
    with.optimizer.kind = lockstep::optimizer_from(optimizer);
    if (with.optimizer.kind == lockstep::OptimizerKind::sgd) with.optimizer.momentum = 0.9;
    with.rate.lr = 0.01;
    with.rate.schedule = lockstep::LearningRate::Schedule::cosine;
    const TrainResult expected = lockstep::train(with);
    with.keep.run_dir = runs_ / (std::string("stopped-") + optimizer);
    train_until(with, 2);
    expect_same(go_on(with, with.keep.run_dir), expected);
    expect_same_bits(std::string("stopped-") + optimizer, std::string("whole-") + optimizer);
  }
}

TEST_F(Resume, AlsoFromWithinAnEpoch) {
  for (const std::string model : {"mlp", "resnet18", "alexnet"}) {  // alexnet has dropout
    SCOPED_TRACE(model);
    const std::string whole = "whole" + model, again = "again" + model;
    TrainOptions settings = options(model == "mlp" ? 1 : 3, whole);
    settings.model.name = model;
    settings.model.width = model == "mlp" ? 0.125 : 0.05;
    if (model == "alexnet") settings.model.image_size = 65;
    settings.keep.checkpoints = {.last = 100, .every = 2};
    const TrainResult expected = lockstep::train(settings);
    const auto state = read_run_state(checkpoint(whole, "epoch-0001-step-000004"));
    EXPECT_EQ(state.history.size(), 1u);
    EXPECT_GT(state.seconds, 0);
    EXPECT_FALSE(fs::exists(checkpoint(whole, "epoch-0001-step-000005")));
    for (const std::string position : {"epoch-0000-step-000002", "epoch-0001-step-000004", "epoch-0003"}) {
      if (model != "mlp" && position != "epoch-0001-step-000004") continue;
      SCOPED_TRACE(position);
      settings.keep.run_dir = runs_ / again;
      settings.keep.checkpoints->every = 0;
      const TrainResult result = go_on(settings, checkpoint(whole, position));
      expect_same(result, expected);
      expect_same_bits(again, whole);
      if (position == "epoch-0001-step-000004") EXPECT_GT(result.history[1].seconds, state.seconds);
      fs::remove_all(runs_ / again);
    }
  }
}

TEST_F(Resume, FromWithinAnEpochWithWhatRanksRemember) {
  const auto with = [&](const std::string& how, const std::string& name) {
    TrainOptions settings = options(3, name + how);
    if (how == "powersgd") settings.way = lockstep::PowerSgd{2};
    if (how == "zero1")
      settings.way = lockstep::Sharded::state, settings.optimizer.kind = lockstep::OptimizerKind::adam,
      settings.rate.lr = 0.01;
    if (how == "zero3") settings.way = lockstep::Sharded::parameters, settings.optimizer.momentum = 0.9;
    return settings;
  };
  for (const std::string how : {"powersgd", "zero1", "zero3"}) {
    SCOPED_TRACE(how);
    TrainOptions settings = with(how, "whole");
    settings.keep.checkpoints = {.last = 100, .every = 3};
    const TrainResult expected = lockstep::train(settings);
    for (const std::string position : {"epoch-0000-step-000003", "epoch-0001-step-000003"}) {
      SCOPED_TRACE(position);
      expect_same(go_on(with(how, "again"), checkpoint("whole" + how, position)), expected);
      expect_same_bits("again" + how, "whole" + how);
      fs::remove_all(runs_ / ("again" + how));
    }
  }
}

// Its configuration has the options of all ways, beside the others.
TEST_F(Resume, FromACheckpointOf0_1) {
  const auto with_zero = [&](const std::string& name) {
    TrainOptions settings = options(2, name);
    settings.way = lockstep::Sharded::gradients, settings.optimizer.momentum = 0.9;
    return settings;
  };
  const TrainResult expected = lockstep::train(with_zero("whole"));
  train_until(with_zero("first"), 2);
  auto state = read_run_state(checkpoint("first", "epoch-0002"));
  auto config = nlohmann::json::parse(state.config);
  config.erase("way");
  config.update({{"compress", "none"},
                 {"compress_rank", 0},
                 {"sync_every", 0},
                 {"outer_lr", 1.0},
                 {"outer_momentum", 0.0},
                 {"zero_stage", 2},
                 {"cuda_graph", false}});
  state.config = config.dump(2) + "\n";
  lockstep::write_run_state(runs_ / "old.safetensors", state);
  expect_same(go_on(with_zero("again"), runs_ / "old.safetensors"), expected);
  expect_same_bits("again", "whole");
}

TEST_F(Resume, OnOtherDevicesAndOtherwiseSplit) {
  TrainOptions settings = options(2, "whole");
  settings.keep.checkpoints = {.last = 100, .every = 2};
  const TrainResult expected = lockstep::train(settings);
  const std::vector<std::optional<ModelSplit>> splits = {std::nullopt,
                                                         ModelSplit{.mesh = {.pipeline = 2}, .microbatches = 2},
                                                         ModelSplit{.mesh = {.data = 2, .tensor = 2}}};
  for (const std::string position : {"epoch-0002", "epoch-0002-step-000004"}) {
    for (size_t i = 0; i < splits.size(); ++i) {
      SCOPED_TRACE(position + ", split " + std::to_string(i));
      const std::string name = position + std::to_string(i);
      TrainOptions other = options(splits[i] ? splits[i]->mesh.size() : 3, name);
      if (splits[i]) other.way = lockstep::SplitNetwork{*splits[i]};
      const TrainResult result = go_on(other, checkpoint("whole", position));
      expect_near(name, "whole");
      EXPECT_EQ(result.history[1].train_loss, expected.history[1].train_loss);  // the epoch before the checkpoint
      EXPECT_NEAR(result.history[2].train_loss, expected.history[2].train_loss, 1e-4);
      EXPECT_NEAR(result.history[2].train_accuracy, expected.history[2].train_accuracy, 1.01 / 150);
      if (!splits[i]) continue;
      TrainOptions back = options(2, name + "back");
      go_on(back, checkpoint(name, "epoch-0003"));
      expect_near(name + "back", "whole");
    }
  }
}

TEST_F(Resume, WhatDrawsRandomNumbersGoesOnDrawing) {
  const auto draw = [] {  // from the generator of the rank's device, which is the one that a run keeps
    return torch::rand({1}, torch::dtype(torch::kDouble).device(lockstep::test_devices(1)[0])).item<double>();
  };
  const auto drawn = [&](const std::string& name, bool resumed) {
    TrainOptions settings = options(1, name);
    settings.epochs = resumed ? 2 : 1;
    if (resumed) settings.keep.resume = settings.keep.run_dir;
    double number = 0;
    lockstep::TrainCallbacks callbacks;
    callbacks.on_step = [&](const lockstep::StepProgress& progress) {
      if (progress.done == progress.total) number = draw();
    };
    lockstep::train(settings, callbacks);
    return number;
  };
  torch::manual_seed(5);
  const double first = drawn("run", false);
  const double second = draw();
  EXPECT_NE(first, second);
  torch::manual_seed(77);
  EXPECT_EQ(drawn("run", true), second);
}

TEST_F(Resume, ARunThatIsDoneGoesOnOnlyWithMoreEpochs) {
  TrainOptions settings = options(1, "run");
  const TrainResult expected = lockstep::train(settings);
  TrainOptions fewer = settings;
  fewer.epochs = 2;
  fewer.keep.run_dir = runs_ / "run2";
  lockstep::train(fewer);
  const auto before = runs_.read("run2/metrics.jsonl");
  EXPECT_EQ(go_on(fewer, fewer.keep.run_dir).history.size(), 2u);
  EXPECT_EQ(runs_.read("run2/metrics.jsonl"), before);
  fewer.epochs = 4;
  expect_same(go_on(fewer, fewer.keep.run_dir), expected);
  fewer.epochs = 3;
  EXPECT_THAT(error_of([&] { go_on(fewer, fewer.keep.run_dir); }), Refused("epochs"));
}

TEST_F(Resume, RefusesAnotherRun) {
  TrainOptions settings = options(1, "run");
  settings.epochs = 1;
  lockstep::train(settings);
  const auto refused = [&](auto change) {
    TrainOptions other = settings;
    change(other);
    return error_of([&] { go_on(other, settings.keep.run_dir); });
  };
  EXPECT_THAT(refused([](auto& o) { o.rate.lr = 0.1; }), Refused("lr"));
  EXPECT_THAT(refused([](auto& o) { o.batch.size = 64; }), Refused("batch_size"));
  EXPECT_THAT(refused([](auto& o) { o.seed = 2; }), Refused("seed"));
  EXPECT_THAT(refused([](auto& o) { o.model.width = 0.25; }), Refused("width"));
  EXPECT_THAT(error_of([&] { go_on(settings, runs_ / "none"); }), Fails(Error::file));
  EXPECT_THAT(error_of([&] { go_on(settings, images_.path()); }), Fails(Error::file));
  EXPECT_THAT(error_of([&] { go_on(settings, settings.keep.run_dir / "model.safetensors"); }), Fails(Error::file));
  TrainOptions onto = settings;  // another run's folder
  onto.keep.run_dir = runs_ / "other";
  lockstep::train(onto);
  EXPECT_THAT(error_of([&] { go_on(onto, settings.keep.run_dir); }), Fails(Error::file));
}

// A run that was stopped, or killed before its first checkpoint.
TEST_F(Resume, AutoGoesOnOrBegins) {
  const TrainResult expected = lockstep::train(options(1, "whole"));
  TrainOptions settings = options(1, "run");
  settings.keep.resume = "auto";
  fs::create_directories(runs_ / "run");
  std::ofstream(runs_ / "run/config.json") << "{}";
  EXPECT_EQ(train_until(settings, 2).history.size(), 2u);
  expect_same(lockstep::train(settings), expected);
  expect_same_bits("run", "whole");
  settings.keep.run_dir.clear();
  EXPECT_THAT(error_of([&] { lockstep::train(settings); }), Refused("resume"));
}

TEST_F(Resume, ARunThatStillTrainsIsNotResumed) {
  TrainOptions settings = options(1, "run");
  lockstep::Caught text;
  lockstep::TrainCallbacks callbacks;
  callbacks.on_epoch = [&](const EpochMetrics& metrics) {
    if (metrics.epoch == 2) text = error_of([&] { go_on(settings, settings.keep.run_dir); });
  };
  lockstep::train(settings, callbacks);
  EXPECT_THAT(text, Fails(Error::file));
}

TEST_F(Resume, ADamagedNewestCheckpointGivesWayToAnEarlierOne) {
  const TrainResult expected = lockstep::train(options(1, "whole"));
  TrainOptions settings = options(1, "run");
  train_until(settings, 3);
  const auto damage = [&](const std::string& name) {
    auto bytes = runs_.read("run/checkpoints/" + name);
    bytes[bytes.size() - 5] ^= 1;
    runs_.write("run/checkpoints/" + name, bytes);
  };
  damage("epoch-0003.safetensors");
  const auto earlier = checkpoint("run", "epoch-0002");
  EXPECT_THAT(error_of([&] { go_on(settings, checkpoint("run", "epoch-0003")); }),  // named, so it is meant
              Fails(Error::file));
  settings.keep.resume = settings.keep.run_dir;
  std::vector<std::string> warnings;
  lockstep::TrainCallbacks callbacks;
  callbacks.on_warning = [&](const std::string& text) { warnings.push_back(text); };
  expect_same(lockstep::train(settings, callbacks), expected);
  ASSERT_FALSE(warnings.empty());  // the others are of the curve
  EXPECT_THAT(warnings[0], AllOf(HasSubstr("epoch-0003.safetensors"), HasSubstr("SHA-256"),
                                 HasSubstr("; the run goes on from " + earlier.string())));
  for (const auto& entry : fs::directory_iterator(runs_ / "run/checkpoints")) damage(entry.path().filename());
  EXPECT_THAT(error_of([&] { go_on(settings, settings.keep.run_dir); }), Fails(Error::file));
}

// A run goes on from what a checkpoint holds, and not from what its name says.
TEST_F(Resume, CheckpointsUnderEachOthersNamesChangeNoBit) {
  const TrainResult expected = lockstep::train(options(1, "whole"));
  for (const std::string from : {"", "epoch-0002", "epoch-0003"}) {
    SCOPED_TRACE(from);
    const std::string name = "run" + from;
    TrainOptions settings = options(1, name);
    train_until(settings, 3);
    swap_files(checkpoint(name, "epoch-0002"), checkpoint(name, "epoch-0003"));
    const TrainResult result = go_on(settings, from.empty() ? settings.keep.run_dir : checkpoint(name, from));
    expect_same(result, expected);
    expect_same_bits(name, "whole");
    expect_same({.history = lockstep::read_metrics(settings.keep.run_dir / "metrics.jsonl")}, expected);
  }
}

// They are refused too if the settings come from the checkpoint, as in the program.
TEST_F(Resume, CheckpointsOfTwoRunsUnderEachOthersNamesAreRefused) {
  TrainOptions one = options(1, "one"), two = options(1, "two");
  two.seed = 2;
  train_until(one, 3);
  train_until(two, 3);
  swap_files(checkpoint("one", "epoch-0003"), checkpoint("two", "epoch-0003"));
  const std::string before = runs_.read("one/config.json");
  const auto as_itself = error_of([&] { go_on(one, one.keep.run_dir); });
  two.keep.run_dir = one.keep.run_dir;
  const auto as_the_other = error_of([&] { go_on(two, one.keep.run_dir); });
  for (const auto& error : {as_itself, as_the_other}) EXPECT_THAT(error, Fails(Error::file));
  EXPECT_EQ(runs_.read("one/config.json"), before);
}

TEST_F(Resume, OtherDataOfTheSameSizeAreRefused) {
  const auto idx = [&](const char* name) { return lockstep::io::sha256_of(images_.read(name)); };
  TrainOptions settings = options(1, "run");
  train_until(settings, 2);
  const auto file = checkpoint("run", "epoch-0002");
  const auto data = read_run_state(file).data;
  ASSERT_TRUE(data);
  EXPECT_EQ(data->train_images, idx("train-images-idx3-ubyte"));
  EXPECT_EQ(data->train_labels, idx("train-labels-idx1-ubyte"));
  EXPECT_EQ(data->test_images, idx("t10k-images-idx3-ubyte"));
  EXPECT_EQ(data->test_labels, idx("t10k-labels-idx1-ubyte"));

  std::string bytes = images_.read("t10k-labels-idx1-ubyte");
  bytes.back() = static_cast<char>(9 - bytes.back());
  images_.write("t10k-labels-idx1-ubyte", bytes);
  EXPECT_THAT(error_of([&] { go_on(settings, settings.keep.run_dir); }), Fails(Error::file));
  auto state = read_run_state(file);  // the state as an earlier lockstep wrote it
  state.data.reset();
  lockstep::write_run_state(file, state);
  EXPECT_EQ(go_on(settings, settings.keep.run_dir).history.size(), 4u);
}

TEST_F(Resume, ACheckpointThatMakesNoSenseIsRefusedInOurWords) {
  TrainOptions settings = options(2, "whole");
  settings.model.name = "resnet18";  // for its buffers
  settings.model.width = 0.05;
  settings.epochs = 1;
  settings.keep.checkpoints = {.last = 100, .every = 3};
  lockstep::train(settings);
  const auto whole = read_run_state(checkpoint("whole", "epoch-0000-step-000003"));
  const auto refused = [&](auto change) {
    auto state = whole;
    change(state);
    lockstep::write_run_state(runs_ / "hostile.safetensors", state);
    settings.keep.run_dir = runs_ / "hostile";
    return error_of([&] { go_on(settings, runs_ / "hostile.safetensors"); });
  };
  const auto tensor = [&](const std::string& name, const torch::Tensor& value) {
    return refused([&](auto& state) {
      std::erase_if(state.tensors, [&](const auto& entry) { return entry.first == name; });
      if (value.defined()) state.tensors.emplace_back(name, value);
    });
  };
  EXPECT_THAT(refused([](auto& s) { s.steps = -5; }), Fails(Error::file));
  EXPECT_THAT(refused([](auto& s) { s.epochs = -1; }), Fails(Error::file));
  EXPECT_THAT(refused([](auto& s) { s.steps = 1'000'000'000'000; }), Fails(Error::file));
  EXPECT_THAT(refused([](auto& s) { s.seconds = 1e308; }), Fails(Error::file));
  EXPECT_THAT(refused([](auto& s) { s.history.push_back({.epoch = 1}); }), Fails(Error::file));
  EXPECT_THAT(tensor("ranks.totals", {}), Fails(Error::file));
  EXPECT_THAT(tensor("ranks.totals", torch::zeros({}, torch::kDouble)), Fails(Error::file));
  EXPECT_THAT(tensor("ranks.totals", torch::zeros({2, 3}, torch::kDouble)), Fails(Error::file));
  EXPECT_THAT(tensor("ranks.rng", torch::zeros({}, torch::kByte)), Fails(Error::file));
  EXPECT_THAT(tensor("ranks.order", torch::zeros({2}, torch::kLong)), Fails(Error::file));
  EXPECT_THAT(tensor("ranks.buffers.any", torch::zeros({2, 3})), Fails(Error::file));
  EXPECT_THAT(tensor("ranks.buffers.any", torch::zeros({})), Fails(Error::file));
  for (const auto& value : {torch::zeros({2}, torch::kLong), torch::zeros({}), torch::tensor(-1, torch::kLong),
                            torch::tensor(151, torch::kLong)}) {
    EXPECT_THAT(tensor("trainer.left_out", value), Fails(Error::file));
  }
}

TEST_F(Resume, WhatAKilledRunLeftGoesAway) {
  const TrainOptions settings = options(1, "run");
  train_until(settings, 1);
  const std::vector<std::string> left = {".model.safetensors.abcdefgh.tmp", ".metrics.jsonl.abcdefgh.tmp"};
  for (const auto& name : left) runs_.write("run/" + name, "half");
  runs_.write("run/.mine.tmp", "of the user");
  go_on(settings, settings.keep.run_dir);
  for (const auto& name : left) EXPECT_FALSE(fs::exists(settings.keep.run_dir / name)) << name;
  EXPECT_TRUE(fs::exists(settings.keep.run_dir / ".mine.tmp"));
}

TEST_F(Resume, KeepsNoCheckpointsIfNoneAreWanted) {
  TrainOptions settings = options(1, "run");
  settings.epochs = 1;
  settings.keep.checkpoints.reset();
  lockstep::train(settings);
  EXPECT_FALSE(fs::exists(runs_ / "run/checkpoints"));
}

}  // namespace resume_test
