// Labels: 3x3 2x4 4x4
// fit(): a network, a loss, data and metrics of one's own give what LibTorch's own loop gives, go on with the same bits
// and end early. What fit() refuses is in fit_refusals_test.cpp.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/nn/tensor_files.hpp>
#include <lockstep/nn/weights.hpp>
#include <lockstep/trainer/fit.hpp>

#include "support/error_of.hpp"
#include "support/group_tests.hpp"
#include "support/scratch_folder.hpp"
#include "support/test_devices.hpp"
#include "support/time_limits.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <future>
#include <map>
#include <memory>
#include <stop_token>
#include <string>
#include <thread>
#include <vector>

namespace fit_test {

using namespace lockstep;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;
using torch::Tensor;
namespace F = torch::nn::functional;
namespace nn = torch::nn;

struct Regressor : nn::Module {
  Regressor() { to(torch::kDouble); }
  Tensor forward(const Tensor& x) { return output(torch::tanh(hidden(x))); }
  nn::Linear hidden = register_module("hidden", nn::Linear(4, 8));
  nn::Linear output = register_module("output", nn::Linear(8, 1));
};

Dataset curve(int64_t samples, uint64_t seed) {
  torch::manual_seed(seed);
  const Tensor x = torch::randn({samples, 4}, torch::kDouble);
  return {x, (x.select(1, 0) * x.select(1, 1) + x.select(1, 2)).unsqueeze(1)};
}

Tensor squares(const Tensor& y_hat, const Tensor& y) {
  return (y_hat - y).square().mean();
}

Task regression() {
  return {
      .name = "regressor",
      .module = [] { return Regressor(); },
      .criterion = squares,
      .train = curve(100, 1),
      .test = curve(31, 2),
      .metrics = {{.name = "mae", .of = [](const Tensor& y_hat, const Tensor& y) { return (y_hat - y).abs().mean(1); }},
                  {.name = "bias", .of = [](const Tensor& y_hat, const Tensor& y) { return (y_hat - y).mean(); }}}};
}

TrainOptions settings(int ranks) {
  TrainOptions options;
  options.devices = test_devices(static_cast<size_t>(ranks));
  options.batch.size = 16;
  options.optimizer.momentum = 0.9;
  options.rate.lr = 0.05;
  options.epochs = 3;
  return options;
}

// ---- What it computes

class FitWorlds : public Worlds {};
INSTANTIATE_TEST_SUITE_P(Sizes, FitWorlds, testing::Values(1, 2, 3, 4),
                         [](const auto& info) { return std::to_string(info.param) + "Ranks"; });

TEST_P(FitWorlds, GivesWhatLibTorchsLoopGives) {
  const ScratchFolder folder;
  const Task task = regression();
  TrainOptions options = settings(GetParam());
  options.optimizer.clip = 0.5;
  options.batch.accumulate = 2;
  options.keep.run_dir = folder / "run";
  const TrainResult result = fit(task, options);
  ASSERT_EQ(result.history.size(), 3u);

  const Dataset train = task.train.tensors(), test = task.test.tensors();
  torch::manual_seed(options.seed);
  Regressor net;
  torch::optim::SGD sgd(net.parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  for (int epoch = 1; epoch <= 3; ++epoch) {
    double losses = 0;
    for (auto& batch : batches(train, {.size = 16, .seed = options.seed, .epoch = epoch})) {
      sgd.zero_grad();
      const Tensor loss = F::mse_loss(net.forward(batch.x), batch.y);
      loss.backward();
      nn::utils::clip_grad_norm_(net.parameters(), 0.5);
      sgd.step();
      losses += loss.item<double>() * static_cast<double>(batch.size());
    }
    const torch::NoGradGuard no_grad;
    const Tensor off = net.forward(test.x) - test.y;
    const EpochMetrics& metrics = result.history[static_cast<size_t>(epoch) - 1];
    EXPECT_NEAR(metrics.train_loss, losses / 100, 1e-10);
    EXPECT_NEAR(metrics.test.at("loss"), off.square().mean().item<double>(), 1e-10);
    EXPECT_NEAR(metrics.test.at("mae"), off.abs().mean().item<double>(), 1e-10);
    EXPECT_NEAR(metrics.test.at("bias"), off.mean().item<double>(), 1e-10);
    EXPECT_TRUE(std::isnan(metrics.train_accuracy) && std::isnan(metrics.test_accuracy));
  }
  if (this_process().index != 0) return;
  Regressor kept;
  load_weights(folder / "run/model.safetensors", kept);  // under the module's own names
  for (const auto& item : net.named_parameters())
    expect_near(kept.named_parameters()[item.key()], item.value(), 1e-10, item.key());
}

// Where the ranks are of several processes; one process has one task. They are refused before the first step.
TEST_P(FitWorlds, ProcessesWithOtherMetricsAreRefused) {
  Task task = regression();
  std::atomic<int> losses = 0;
  task.criterion = [&](const Tensor& y_hat, const Tensor& y) {
    ++losses;
    return squares(y_hat, y);
  };
  if (this_process().index > 0) task.metrics.pop_back();
  const auto error = error_of([&] { fit(task, settings(GetParam())); });
  if (this_process().count == 1) {
    EXPECT_EQ(error, "(no error)");
    EXPECT_GT(losses.load(), 0);
  } else {
    EXPECT_THAT(error, Fails(Error::difference));
    EXPECT_EQ(losses.load(), 0);
  }
}

struct TokenNet : nn::Module {
  Tensor forward(const Tensor& x) {
    EXPECT_EQ(x.scalar_type(), torch::kLong);
    return output(embedding(x).mean(1));
  }
  nn::Embedding embedding = register_module("embedding", nn::Embedding(20, 6));
  nn::Linear output = register_module("output", nn::Linear(6, 3));
};

Dataset sentences(int64_t samples, uint64_t seed) {
  torch::manual_seed(seed);
  const Tensor x = torch::randint(20, {samples, 5});
  return {x, x.sum(1) % 3};
}

Task tokens() {
  return {.name = "tokens",
          .module = [] { return std::make_shared<TokenNet>(); },
          .criterion = F::cross_entropy,
          .train = sentences(50, 1),
          .test = sentences(20, 2),
          .accuracy = true};
}

TEST(Fit, TokensStayIntegersAndAFunctionReadsTheSame) {
  const Task in_memory = tokens();
  Task read = in_memory;
  const auto reader = [](const Dataset& all) {
    return Samples(all.size(), [all](const std::vector<int64_t>& numbers) {
      const Tensor rows = torch::tensor(numbers);
      return Dataset{all.x.index_select(0, rows), all.y.index_select(0, rows)};
    });
  };
  read.train = reader(in_memory.train.tensors());
  read.test = reader(in_memory.test.tensors());
  const TrainOptions options = settings(3);  // the last batch has two samples, so one rank has none
  const auto expected = fit(in_memory, options).history, history = fit(read, options).history;
  ASSERT_EQ(history.size(), 3u);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(history[i].weights, expected[i].weights);
    EXPECT_EQ(history[i].train_accuracy, expected[i].train_accuracy);
    EXPECT_EQ(history[i].test_accuracy, expected[i].test_accuracy);
    EXPECT_EQ(history[i].test, expected[i].test);
  }
  EXPECT_GE(history[2].test_accuracy, 0);
}

TEST(Fit, WithAGrainEverythingHasTheSameBitsOnAnyNumberOfRanks) {
  Task task = tokens();
  task.metrics = {{.name = "sureness", .of = [](const Tensor& y_hat, const Tensor&) { return y_hat.amax(1); }}};
  std::vector<EpochMetrics> expected;
  for (const int ranks : {1, 3}) {
    TrainOptions options = settings(ranks);
    options.batch.grain = 4;
    const auto history = fit(task, options).history;
    if (ranks == 1) expected = history;
    for (size_t i = 0; i < 3; ++i) {
      EXPECT_EQ(history[i].weights, expected[i].weights);
      EXPECT_EQ(history[i].train_loss, expected[i].train_loss);
      EXPECT_EQ(history[i].test, expected[i].test);
    }
  }
}

// ---- How it goes on and ends

class FitRuns : public testing::Test {
 protected:
  TrainOptions in(const std::string& name, int ranks = 2) const {
    TrainOptions options = settings(ranks);
    options.keep.run_dir = runs_ / name;
    return options;
  }
  std::vector<std::string> checkpoints(const std::string& run) const {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(runs_ / run / "checkpoints"))
      names.push_back(entry.path().stem());
    std::sort(names.begin(), names.end());
    return names;
  }
  const ScratchFolder runs_;
};

TEST_F(FitRuns, GoOnFromWithinAnEpochWithTheSameBits) {
  TrainOptions options = in("whole");
  options.keep.checkpoints = {.last = 100, .every = 3};
  const TrainResult expected = fit(regression(), options);
  options = in("again");
  options.keep.resume = runs_ / "whole/checkpoints/epoch-0001-step-000003.safetensors";
  const TrainResult result = fit(regression(), options);
  ASSERT_EQ(result.history.size(), 3u);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(result.history[i].weights, expected.history[i].weights);
    EXPECT_EQ(result.history[i].train_loss, expected.history[i].train_loss);
    EXPECT_EQ(result.history[i].test, expected.history[i].test);
  }
  EXPECT_TRUE(runs_.read("again/model.safetensors") == runs_.read("whole/model.safetensors"));
  EXPECT_EQ(read_metrics(runs_ / "again/metrics.jsonl")[2].test, expected.history[2].test);
}

// A net with a layer for few samples, so that most steps do not use the layer.
struct Branching : nn::Module {
  static Tensor is_rare(const Tensor& x) { return x.select(1, 0) > 2; }
  Branching() { to(torch::kDouble); }
  Tensor forward(const Tensor& x) {
    const Tensor y = often(x);
    return is_rare(x).any().item<bool>() ? y + rare(x) : y;
  }
  nn::Linear often = register_module("often", nn::Linear(4, 1));
  nn::Linear rare = register_module("rare", nn::Linear(4, 1));
};

// LibTorch's optimizers leave out a parameter without a gradient. A run that went on would have none, and other bits.
TEST_F(FitRuns, GoOnWithTheSameBitsThoughStepsDoNotUseAParameter) {
  Task task = regression();
  task.module = [] { return Branching(); };
  const auto rare = Branching::is_rare(curve(100, 1).x).sum().item<int64_t>();
  ASSERT_TRUE(rare > 0 && rare < 4);  // an epoch has 7 steps
  for (const int grain : {0, 4}) {
    const std::string name = "of grain " + std::to_string(grain);
    TrainOptions options = in(name);
    if (grain > 0) options.batch.grain = grain;
    options.keep.checkpoints = {.last = 100, .every = 1};
    const TrainResult expected = fit(task, options);
    for (const int step : {1, 2, 3, 4, 5, 6}) {
      const std::string from = "epoch-0002-step-00000" + std::to_string(step);
      options.keep.run_dir = runs_ / (name + from);
      options.keep.resume = runs_ / name / "checkpoints" / (from + ".safetensors");
      EXPECT_EQ(fit(task, options).history.back().weights, expected.history.back().weights) << name << ", " << step;
    }
  }
}

TEST_F(FitRuns, EndWhenPatienceIsOutAndKeepTheBestEpoch) {
  Task task = regression();
  task.metrics.push_back({.name = "never better", .of = [](const Tensor&, const Tensor& y) { return y.select(1, 0); }});
  task.best_by = "never better";
  task.patience = 2;
  TrainOptions options = in("run");
  options.epochs = 9;
  options.keep.checkpoints = {.last = 1};
  EXPECT_EQ(fit(task, options).history.size(), 3u);  // the first is the best
  EXPECT_THAT(checkpoints("run"), ElementsAre("epoch-0001", "epoch-0003"));
  options.keep.resume = options.keep.run_dir;
  EXPECT_EQ(fit(task, options).history.size(), 3u);
  task.patience = 4;
  EXPECT_EQ(fit(task, options).history.size(), 5u);

  task.best_by = "mae";  // mae gets better
  options = in("other");
  options.keep.checkpoints = {.last = 1};
  EXPECT_EQ(fit(task, options).history.size(), 3u);
  EXPECT_THAT(checkpoints("other"), ElementsAre("epoch-0003"));
}

TEST_F(FitRuns, SayBeforeThatTheLastBatchHasOneSampleAndCanLeaveItOut) {
  Task task = regression();
  task.module = [] {
    nn::Sequential net(nn::Linear(4, 8), nn::BatchNorm1d(8), nn::Linear(8, 1));
    net->to(torch::kDouble);
    return net;
  };
  task.criterion = [](const Tensor& y_hat, const Tensor&) { return y_hat.square().mean() * 0 + 1; };
  task.train = curve(33, 1);
  TrainOptions options = in("run");
  options.devices = test_devices(1);
  options.batch.size = 8;
  std::vector<std::string> warnings;
  int64_t samples = 0;
  const TrainCallbacks callbacks{.on_step = [&](const StepProgress& progress) { samples = progress.total; },
                                 .on_warning =
                                     [&](const std::string& text) {
                                       if (text.find("last batch") != text.npos) warnings.push_back(text);
                                     }};
  EXPECT_THAT(error_of([&] { fit(task, options, callbacks); }), Fails(Error::refused, {0}));
  EXPECT_THAT(warnings, ElementsAre(AllOf(HasSubstr("the last batch of an epoch has 1 of 33 samples"),
                                          HasSubstr("`drop_last` leaves the batch out"))));

  warnings.clear();
  options.batch.drop_last = true;
  options.keep.checkpoints = {.last = 100, .every = 3};
  const TrainResult whole = fit(task, options, callbacks);
  EXPECT_THAT(warnings, testing::IsEmpty());
  EXPECT_EQ(samples, 32);
  for (const auto& metrics : whole.history) EXPECT_EQ(metrics.train_loss, 1);
  options.keep.resume = options.keep.run_dir / "checkpoints/epoch-0002-step-000003.safetensors";
  options.keep.run_dir = runs_ / "again";
  EXPECT_EQ(fit(task, options).history.back().weights, whole.history.back().weights);
  options.keep.run_dir = runs_ / "third";
  options.batch.drop_last = false;  // a run that goes on may change drop_last
  EXPECT_THAT(error_of([&] { fit(task, options); }), Fails(Error::refused, {0}));
}

TEST_F(FitRuns, SayOnceThatAMeasureHasNoValue) {
  Task task = regression();
  task.metrics.push_back({.name = "broken", .of = [](const Tensor&, const Tensor& y) { return y.select(1, 0) / 0; }});
  task.best_by = "broken";
  task.patience = 2;
  TrainOptions options = in("run");
  options.epochs = 6;
  std::vector<std::string> warnings;
  const TrainCallbacks callbacks{.on_warning = [&](const std::string& text) {
    if (text.find("is no finite number") != text.npos) warnings.push_back(text);
  }};
  EXPECT_EQ(fit(task, options, callbacks).history.size(), 2u);
  EXPECT_THAT(warnings, ElementsAre(AllOf(HasSubstr("epoch 1: the test samples' broken"), HasSubstr("never the best"),
                                          HasSubstr("the run ends after 2 epochs"))));
  warnings.clear();
  task.best_by = "mae";
  fit(task, in("other"), callbacks);
  EXPECT_THAT(warnings, testing::IsEmpty());
}

TEST_F(FitRuns, TellTheirCallbacksAndStopWhenAsked) {
  std::stop_source stop;
  std::string data;
  std::vector<double> losses;
  Task task = regression();
  task.source = "a curve";
  TrainOptions options = in("run");
  options.keep.tensorboard = true;
  const auto result = fit(task, options,
                          {.on_data = [&](const std::string& source) { data = source; },
                           .on_epoch =
                               [&](const EpochMetrics& metrics) {
                                 losses.push_back(metrics.test.at("loss"));
                                 stop.request_stop();
                               },
                           .stop = stop.get_token()});
  EXPECT_TRUE(result.stopped);
  EXPECT_EQ(data, "a curve");
  EXPECT_THAT(losses, ElementsAre(result.history.at(0).test.at("loss")));
  for (const auto& entry : std::filesystem::directory_iterator(runs_ / "run")) {
    if (!entry.path().filename().string().starts_with("events.")) continue;
    EXPECT_THAT(runs_.read(entry.path()), AllOf(HasSubstr("mae/test"), Not(HasSubstr("accuracy/"))));
  }
  const std::string config = runs_.read("run/config.json");
  EXPECT_THAT(config, AllOf(HasSubstr("\"model\": \"regressor\""), Not(HasSubstr("fashion")), Not(HasSubstr("width"))));
  EXPECT_THAT(error_of([&] { evaluate_run(runs_ / "run", {.devices = test_devices(1)}); }), Refused("model"));
}

TEST_F(FitRuns, AreRefusedOtherDataAndAnotherNetworksRun) {
  fit(regression(), in("run"));
  TrainOptions options = in("run");
  options.epochs = 4;
  options.keep.resume = options.keep.run_dir;
  Task task = regression();
  task.train = curve(100, 7);
  EXPECT_THAT(error_of([&] { fit(task, options); }), Fails(Error::file, {}, {"train_images"}));
  task = regression();
  task.name = "another";
  EXPECT_THAT(error_of([&] { fit(task, options); }), Refused("model"));
  TrainOptions of_lockstep = options;
  of_lockstep.data = SyntheticImages();
  EXPECT_THAT(error_of([&] { train(of_lockstep); }), Refused("model"));
  EXPECT_EQ(fit(regression(), options).history.size(), 4u);
}

TEST(Fit, NamesTheFunctionOfItsCallerThatStandsStillWhenTheTimeoutStrikes) {
  const Task quick = regression();
  TrainOptions options = settings(2);
  options.timeout = std::chrono::seconds(kSlowdown);
  const auto error_where = [&](const std::string& where) {
    std::atomic<bool> stood = false;
    const auto stand_in = [&](const std::string& here) {  // on one rank
      if (here == where && !stood.exchange(true)) std::this_thread::sleep_for(options.timeout * 5 / 2.0);
    };
    Task task = quick;
    task.criterion = [&](const Tensor& y_hat, const Tensor& y) {
      stand_in("the criterion of \"regressor\"");
      return squares(y_hat, y);
    };
    task.metrics = {{.name = "far", .of = [&](const Tensor& y_hat, const Tensor& y) {
                       stand_in("the metric \"far\"");
                       return (y_hat - y).abs().mean();
                     }}};
    TrainOptions options = settings(2);
    options.timeout = std::chrono::seconds(1);
    return error_of(
        [&] { fit(task, options, {.on_step = [&](const StepProgress&) { stand_in("TrainCallbacks::on_step"); }}); });
  };
  std::map<std::string, std::future<lockstep::Caught>> errors;  // at once: they do nothing but stand
  for (const char* where : {"the criterion of \"regressor\"", "the metric \"far\"", "TrainCallbacks::on_step"})
    errors[where] = std::async(std::launch::async, error_where, where);
  for (auto& [where, error] : errors)
    EXPECT_THAT(error.get(), AllOf(HasSubstr(". Meanwhile rank "), HasSubstr(" (cpu) has been in " + where + " for ")));
}

// ---- What is kept

// Its spectrum is complex, as in networks of Fourier layers.
struct Spectral : nn::Module {
  explicit Spectral(torch::ScalarType type) {
    freqs = register_buffer("freqs_cis", torch::ones({4}, type));
    scale = register_parameter("scale", torch::complex(torch::ones({4}), torch::ones({4})));
  }
  Tensor forward(const Tensor& x) { return torch::real(x * scale * freqs).sum(1, /*keepdim=*/true).to(torch::kDouble); }
  Tensor freqs, scale;
};

TEST_F(FitRuns, KeepComplexNumbersAndRefuseWhatNoFileHoldsBeforeTheFirstStep) {
  Task task = regression();
  int steps = 0;
  const auto train = [&](torch::ScalarType type, const TrainOptions& options) {
    task.module = [type] { return Spectral(type); };
    steps = 0;
    return fit(task, options, {.on_step = [&](const StepProgress&) { ++steps; }});
  };
  TrainOptions options = in("refused");
  options.optimizer.clip = 0.5;
  EXPECT_THAT(error_of([&] { train(torch::kComplexDouble, options); }), Refused("module", "run_dir"));
  EXPECT_EQ(steps, 0);
  EXPECT_FALSE(std::filesystem::exists(runs_ / "refused"));
  options.keep.run_dir.clear();
  EXPECT_EQ(train(torch::kComplexDouble, options).history.size(), 3u);

  const auto history = train(torch::kComplexFloat, in("kept")).history;
  ASSERT_EQ(history.size(), 3u);
  Spectral net(torch::kComplexFloat);
  load_weights(runs_ / "kept/model.safetensors", net);
  EXPECT_EQ(weights_hash(net), history.back().weights);
}

}  // namespace fit_test
