// Labels: 3x3 2x4 4x4
// fit() gives what LibTorch's own loop gives, however its ranks divide the work: by data at every stage of ZeRO, by
// layers, by channels, and by several of these.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/nn/weights.hpp>
#include <lockstep/trainer/fit.hpp>

#include "support/group_tests.hpp"
#include "support/scratch_folder.hpp"
#include "support/test_devices.hpp"

#include <cstdlib>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace fit_layouts_test {

using namespace lockstep;
using torch::Tensor;
namespace F = torch::nn::functional;
namespace nn = torch::nn;

constexpr double kTolerance = 1e-10;
constexpr int64_t kBatch = 16, kSamples = 50;  // so the last batch has two samples, fewer than there are ranks

// Nine layers, which two stages on each of four ranks need. Twelve features, which 1 to 4 ranks divide.
nn::Sequential network() {
  nn::Sequential net(nn::Linear(5, 12));
  for (int i = 0; i < 4; ++i) {
    net->push_back(nn::Tanh());
    net->push_back(nn::Linear(12, 12));
  }
  net->to(torch::kDouble);
  return net;
}

Dataset classes(int64_t samples, uint64_t seed) {
  torch::manual_seed(seed);
  const Tensor x = torch::randn({samples, 5}, torch::kDouble);
  return {x, x.abs().sum(1).mul(3).to(torch::kLong).clamp_max(11)};
}

Tensor sureness(const Tensor& y_hat) {
  return y_hat.softmax(1).amax(1);
}

// A mean over the weights of the targets that are left in: a MeanOver.
F::CrossEntropyFuncOptions weighted() {
  return F::CrossEntropyFuncOptions().ignore_index(4).weight(torch::linspace(0.25, 3, 12, torch::kDouble));
}

Task task(const Criterion& criterion = F::cross_entropy) {
  return {.name = "tanhs",
          .module = network,
          .criterion = criterion,
          .train = classes(kSamples, 1),
          .test = classes(21, 2),
          .accuracy = true,
          .metrics = {{.name = "sureness", .of = [](const Tensor& y_hat, const Tensor&) { return sureness(y_hat); }}}};
}

TrainOptions settings(int ranks) {
  TrainOptions options;
  options.devices = test_devices(static_cast<size_t>(ranks));
  options.batch.size = kBatch;
  options.optimizer.momentum = 0.9;
  options.optimizer.weight_decay = 0.01;
  options.rate.lr = 0.5;
  options.epochs = 2;
  return options;
}

// The results of LibTorch alone.
struct Expected {
  std::vector<double> train_losses, test_losses, sureness, accuracies;  // an epoch each
  nn::Sequential net;
};

Expected by_libtorch(uint64_t seed, int epochs, const F::CrossEntropyFuncOptions& loss_options = {}) {
  const Task all = task();
  const Dataset test = all.test.tensors();
  torch::manual_seed(seed);
  Expected expected{.net = network()};
  const auto options = torch::optim::SGDOptions(0.5).momentum(0.9).weight_decay(0.01);
  torch::optim::SGD sgd(expected.net->parameters(), options);
  for (int epoch = 1; epoch <= epochs; ++epoch) {
    double losses = 0;
    for (auto& batch : batches(all.train, {.size = kBatch, .seed = seed, .epoch = epoch})) {
      sgd.zero_grad();
      const Tensor loss = F::cross_entropy(expected.net->forward(batch.x), batch.y, loss_options);
      loss.backward();
      sgd.step();
      losses += loss.item<double>() * static_cast<double>(batch.size());
    }
    const torch::NoGradGuard no_grad;
    const Tensor y_hat = expected.net->forward(test.x);
    expected.train_losses.push_back(losses / kSamples);
    expected.test_losses.push_back(F::cross_entropy(y_hat, test.y, loss_options).item<double>());
    expected.sureness.push_back(sureness(y_hat).mean().item<double>());
    expected.accuracies.push_back((y_hat.argmax(1) == test.y).to(torch::kDouble).mean().item<double>());
  }
  return expected;
}

void expect_epochs(const std::vector<EpochMetrics>& history, const Expected& expected) {
  ASSERT_EQ(history.size(), expected.train_losses.size());
  for (size_t i = 0; i < history.size(); ++i) {
    SCOPED_TRACE("epoch " + std::to_string(i + 1));
    EXPECT_NEAR(history[i].train_loss, expected.train_losses[i], kTolerance);
    EXPECT_NEAR(history[i].test.at("loss"), expected.test_losses[i], kTolerance);
    EXPECT_NEAR(history[i].test.at("sureness"), expected.sureness[i], kTolerance);
    EXPECT_NEAR(history[i].test_accuracy, expected.accuracies[i], kTolerance);
  }
}

void expect_weights(const std::filesystem::path& file, const Expected& expected) {
  nn::Sequential kept = network();
  load_weights(file, *kept);
  for (const auto& item : expected.net->named_parameters()) {
    expect_near(kept->named_parameters()[item.key()], item.value(), kTolerance, item.key());
  }
}

struct Layout {
  std::optional<ModelSplit> split;
  int zero_stage = 0;
};

std::vector<Layout> layouts(int ranks) {
  std::vector<Layout> all;
  for (const int stage : {0, 1, 2, 3}) all.push_back({{}, stage});
  for (const MeshShape& mesh : mesh_shapes(ranks)) {
    ModelSplit split{.mesh = mesh, .microbatches = mesh.pipeline > 1 ? 2 : 1};
    all.push_back({split});
    if (mesh.tensor > 1) {
      split.tensor_rule = TensorRule::alternating;
      all.push_back({split});
    }
    if (mesh.pipeline == 1) continue;
    split.schedule = PipelineSchedule::gpipe;
    split.microbatches = 3;
    split.recompute = true;
    all.push_back({split});
    split.schedule = PipelineSchedule::interleaved;
    split.stages_per_rank = 2;
    split.microbatches = 2 * mesh.pipeline;
    all.push_back({split});
  }
  return all;
}

Way way_of(const Layout& layout) {
  return layout.split ? Way(SplitNetwork{*layout.split}) : static_cast<Sharded>(layout.zero_stage);
}

std::string name_of(const Layout& layout) {
  return layout.split ? to_string(*layout.split) : "ZeRO " + std::to_string(layout.zero_stage);
}

class FitLayoutWorlds : public Worlds {};
INSTANTIATE_TEST_SUITE_P(Sizes, FitLayoutWorlds, testing::Values(1, 2, 3, 4),
                         [](const auto& info) { return std::to_string(info.param) + "Ranks"; });

TEST_P(FitLayoutWorlds, GiveWhatLibTorchsLoopGives) {
  TrainOptions options = settings(GetParam());
  const Expected expected = by_libtorch(options.seed, options.epochs);
  for (const Layout& layout : layouts(GetParam())) {
    SCOPED_TRACE(name_of(layout));
    const ScratchFolder folder;
    options.way = way_of(layout);
    options.keep.run_dir = folder / "run";
    expect_epochs(fit(task(), options).history, expected);
    if (this_process().index == 0) expect_weights(folder / "run/model.safetensors", expected);
  }
}

TEST_P(FitLayoutWorlds, GiveItWithAMeanOverWeightsOfClasses) {
  TrainOptions options = settings(GetParam());
  const Expected expected = by_libtorch(options.seed, options.epochs, weighted());
  const Task weighs = task({F::cross_entropy, weighted()});
  for (const Layout& layout : layouts(GetParam())) {
    for (const int accumulate : {1, 3}) {
      if (accumulate > 1 && layout.split) continue;
      SCOPED_TRACE(name_of(layout) + ", accumulate " + std::to_string(accumulate));
      options.way = way_of(layout);
      options.batch.accumulate = accumulate;
      expect_epochs(fit(weighs, options).history, expected);
    }
  }
}

// Each epoch goes on from the checkpoint of the one before.
TEST(FitLayouts, ARunGoesOnInAnyOtherLayout) {
  const std::vector<std::pair<int, Layout>> each = {
      {4, {{}, 3}}, {3, {ModelSplit{.mesh = {.pipeline = 3}}}},
      {2, {{}, 1}}, {4, {ModelSplit{.mesh = {.data = 2, .tensor = 2}}}},
      {3, {{}, 2}}, {4, {ModelSplit{.mesh = {.pipeline = 2, .tensor = 2}, .microbatches = 2}}},
      {1, {{}, 3}}, {4, {{}, 3}}};
  const ScratchFolder folder;
  std::vector<EpochMetrics> history;
  TrainOptions options = settings(1);
  for (const auto& [ranks, layout] : each) {
    options.epochs = static_cast<int>(history.size()) + 1;
    options.devices = test_devices(static_cast<size_t>(ranks));
    options.way = way_of(layout);
    if (!history.empty()) options.keep.resume = folder / "run";
    options.keep.run_dir = folder / "run";
    history = fit(task(), options).history;
  }
  const Expected expected = by_libtorch(options.seed, options.epochs);
  expect_epochs(history, expected);
  expect_weights(folder / "run/model.safetensors", expected);
}

}  // namespace fit_layouts_test
