// Task::before_step: when fit() calls it, and that a loop of LibTorch's has the same rates and losses between steps.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/nn/tensor_files.hpp>
#include <lockstep/nn/weights.hpp>
#include <lockstep/trainer/fit.hpp>

#include "support/group_tests.hpp"
#include "support/scratch_folder.hpp"
#include "support/test_devices.hpp"

#include <cmath>
#include <cstdlib>
#include <map>
#include <mutex>
#include <stdexcept>
#include <stop_token>
#include <string>
#include <vector>

namespace before_step_test {

using namespace lockstep;
using testing::HasSubstr;
using torch::Tensor;
namespace F = torch::nn::functional;
namespace nn = torch::nn;

constexpr int kEpochs = 3;
constexpr int64_t kSteps = 4;  // steps per epoch, of 16 samples at most

nn::Sequential network() {
  nn::Sequential net(nn::Linear(5, 12), nn::Tanh(), nn::Linear(12, 12), nn::Tanh(), nn::Linear(12, 4));
  net->to(torch::kDouble);
  return net;
}

Dataset classes(int64_t samples, uint64_t seed) {
  torch::manual_seed(seed);
  const Tensor x = torch::randn({samples, 5}, torch::kDouble);
  return {x, x.abs().sum(1).mul(0.9).to(torch::kLong).clamp_max(3)};
}

const Dataset kTest = classes(21, 2);

Task task() {
  return {.name = "tanhs", .module = network, .criterion = F::cross_entropy, .train = classes(50, 1), .test = kTest};
}

TrainOptions settings(int ranks) {
  TrainOptions options;
  options.devices = test_devices(static_cast<size_t>(ranks));
  options.batch.size = 16;
  options.optimizer.momentum = 0.9;
  options.rate.lr = 0.05;
  options.epochs = kEpochs;
  return options;
}

double rate_of(int64_t steps_done) {
  return 0.1 / (1 + static_cast<double>(steps_done % 5));
}

// The function saw this on one rank.
struct Seen {
  std::vector<int64_t> steps;          // steps of the run that were done
  std::map<int64_t, double> losses;    // losses of the epoch so far, by these steps
  std::map<int64_t, double> measured;  // test losses, by these steps
};

// Sets a rate of its own for each step, and measures before each third one.
Task watched(std::vector<Seen>& seen) {
  Task task = before_step_test::task();
  task.before_step = [&seen](const NextStep& next) {
    Seen& mine = seen[static_cast<size_t>(next.rank.index())];
    const int64_t steps = (next.epoch - 1) * next.steps + next.done;
    EXPECT_EQ(next.steps, kSteps);
    mine.steps.push_back(steps);
    next.optimizer.set_lr(rate_of(steps));
    mine.losses[steps] = next.loss();
    if (steps % 3 != 0) return;
    next.net.eval();  // and not back again
    mine.measured[steps] = evaluate([&](const Tensor& x) { return next.net.forward(x); }, kTest.to(next.rank.device()),
                                    next.net.mesh().data())
                               .loss;
  };
  return task;
}

struct Way {
  std::string name;
  int ranks;
  decltype(TrainOptions::way) way = {};
};

std::vector<Way> ways() {
  return {{"one rank", 1},
          {"three ranks", 3},
          {"ZeRO 1", 2, Sharded::state},
          {"ZeRO 2", 3, Sharded::gradients},
          {"ZeRO 3", 2, Sharded::parameters},
          {"layers", 2, SplitNetwork{{.mesh = {.pipeline = 2}, .microbatches = 2}}},
          {"data and channels", 4, SplitNetwork{{.mesh = {.data = 2, .tensor = 2}}}}};
}

TEST(BeforeStep, SetsTheRatesAndMeasuresTheNetOfALoopOfLibTorchInEachLayout) {
  TrainOptions options = settings(1);
  torch::manual_seed(options.seed);
  nn::Sequential net = network();
  torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(1).momentum(0.9));
  std::map<int64_t, double> losses, measured;
  std::vector<double> tested, last_rates;
  int64_t steps = 0;
  const auto test_loss = [&] {
    const torch::NoGradGuard no_grad;
    return F::cross_entropy(net->forward(kTest.x), kTest.y).item<double>();
  };
  for (int epoch = 1; epoch <= kEpochs; ++epoch) {
    double sum = 0;
    int64_t samples = 0;
    for (auto& batch : batches(task().train, {.size = 16, .seed = options.seed, .epoch = epoch})) {
      losses[steps] = samples == 0 ? 0 : sum / static_cast<double>(samples);
      if (steps % 3 == 0) measured[steps] = test_loss();
      static_cast<torch::optim::SGDOptions&>(sgd.param_groups()[0].options()).lr(rate_of(steps));
      sgd.zero_grad();
      const Tensor loss = F::cross_entropy(net->forward(batch.x), batch.y);
      loss.backward();
      sgd.step();
      sum += loss.item<double>() * static_cast<double>(batch.size());
      samples += batch.size();
      ++steps;
    }
    tested.push_back(test_loss());
    last_rates.push_back(rate_of(steps - 1));
  }
  for (const Way& way : ways()) {
    SCOPED_TRACE(way.name);
    std::vector<Seen> seen(static_cast<size_t>(way.ranks));
    options = settings(way.ranks);
    options.way = way.way;
    const auto history = fit(watched(seen), options).history;
    ASSERT_EQ(history.size(), static_cast<size_t>(kEpochs));
    for (size_t i = 0; i < history.size(); ++i) {
      EXPECT_NEAR(history[i].test.at("loss"), tested[i], 1e-10);
      EXPECT_EQ(history[i].lr, last_rates[i]);
    }
    for (const Seen& mine : seen) {
      EXPECT_EQ(mine.steps.size(), static_cast<size_t>(steps));
      ASSERT_EQ(mine.measured.size(), measured.size());
      for (const auto& [step, loss] : measured) EXPECT_NEAR(mine.measured.at(step), loss, 1e-10) << step;
    }
    if (way.ranks > 1) continue;  // there it is one rank's share
    for (const auto& [step, loss] : losses) EXPECT_NEAR(seen[0].losses.at(step), loss, 1e-10) << step;
  }
}

// From within an epoch, on a step that it has set a rate for; and the whole net that it saves.
TEST(BeforeStep, GoesOnWithTheSameBitsAndSavesTheWholeNet) {
  for (const Way& way : ways()) {
    SCOPED_TRACE(way.name);
    const ScratchFolder folder;
    std::vector<Seen> seen(static_cast<size_t>(way.ranks));
    Task task = watched(seen);
    const auto watch = task.before_step;
    task.before_step = [&](const NextStep& next) {
      watch(next);
      if (next.epoch != 3 || next.done != 2) return;  // two whole epochs and two steps
      const auto whole = next.whole();
      if (next.rank.index() == 0) save_weights(folder / "net", *whole);
    };
    TrainOptions options = settings(way.ranks);
    options.way = way.way;
    options.keep.run_dir = folder / "run";
    options.keep.checkpoints = {.last = 100, .every = 2};
    const auto expected = fit(task, options).history;
    options.keep.run_dir = folder / "again";
    options.keep.resume = folder / "run/checkpoints/epoch-0002-step-000002.safetensors";
    const auto history = fit(task, options).history;
    EXPECT_EQ(history.back().weights, expected.back().weights);
    EXPECT_EQ(history.back().train_loss, expected.back().train_loss);

    const auto saved = load_tensors(folder / "net");
    const auto checkpoint = load_tensors(options.keep.resume);
    for (const auto& item : network()->named_parameters())
      EXPECT_TRUE(torch::equal(saved.at(item.key()), checkpoint.at("model." + item.key()))) << item.key();
  }
}

// The checkpoint has the momentum of a layer that the module freezes when it is made again.
TEST(BeforeStep, UnfreezesALayerAndGoesOnWithTheSameBits) {
  for (const int ranks : {1, 2}) {
    const ScratchFolder folder;
    Task task = before_step_test::task();
    task.module = [] {
      nn::Sequential net = network();
      for (auto& parameter : net[0]->parameters()) parameter.requires_grad_(false);
      return net;
    };
    TrainOptions options = settings(ranks);
    const auto frozen = fit(task, options).history;
    task.before_step = [](const NextStep& next) {
      if (next.epoch < 2) return;
      for (auto& parameter : next.whole()->parameters()) parameter.requires_grad_(true);
    };
    options.keep.run_dir = folder / "run";
    options.keep.checkpoints = {.last = 100, .every = 2};
    const auto expected = fit(task, options).history;
    EXPECT_EQ(expected[0].weights, frozen[0].weights);
    EXPECT_NE(expected[1].weights, frozen[1].weights);
    options.keep.run_dir = folder / "again";
    options.keep.resume = folder / "run/checkpoints/epoch-0002-step-000002.safetensors";
    EXPECT_EQ(fit(task, options).history.back().weights, expected.back().weights);
  }
}

TEST(BeforeStep, EndsTheRunByTheStopTokenAndByAnException) {
  for (const int ranks : {1, 3}) {
    std::stop_source stop;
    std::vector<Seen> seen(static_cast<size_t>(ranks));
    Task task = watched(seen);
    const auto watch = task.before_step;
    task.before_step = [&](const NextStep& next) {
      watch(next);
      if (next.epoch == 2 && next.done == 1 && next.rank.index() == ranks - 1) stop.request_stop();
    };
    const TrainResult result = fit(task, settings(ranks), {.stop = stop.get_token()});
    EXPECT_TRUE(result.stopped);
    EXPECT_EQ(result.history.size(), 1u);
    EXPECT_LT(seen[0].steps.size(), static_cast<size_t>(kEpochs * kSteps));

    task.before_step = [&](const NextStep& next) {
      if (next.epoch == 2 && next.rank.index() == ranks - 1) throw std::runtime_error("the disk has burnt");
    };
    const auto error = error_of([&] { fit(task, settings(ranks)); });
    EXPECT_THAT(error, Fails(Error::user_code));
    EXPECT_THAT(error, HasSubstr("the disk has burnt"));
  }
}

// A BatchNorm tells the modes apart.
TEST(BeforeStep, TrainsOnThoughItLeftTheNetInEvaluation) {
  Task task = before_step_test::task();
  task.module = [] {
    nn::Sequential net(nn::Linear(5, 12), nn::BatchNorm1d(12), nn::Linear(12, 4));
    net->to(torch::kDouble);
    return net;
  };
  const auto expected = fit(task, settings(1)).history;
  task.before_step = [](const NextStep& next) { next.net.eval(); };
  EXPECT_EQ(fit(task, settings(1)).history.back().weights, expected.back().weights);
}

TEST(BeforeStep, OtherRatesOnSomeRanksAreRefused) {
  Task task = before_step_test::task();
  task.before_step = [](const NextStep& next) { next.optimizer.set_lr(next.rank.index() == 0 ? 0.1 : 0.2); };
  EXPECT_THAT(error_of([&] { fit(task, settings(2)); }), Fails(Error::difference));
}

}  // namespace before_step_test
