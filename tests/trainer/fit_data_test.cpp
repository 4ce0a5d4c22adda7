// Labels: 3x3 2x4
// fit() and a loop of one's own on batches of more than x and y, on files, with an optimizer of one's own and an
// average of the weights: each gives what LibTorch's own loop gives.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/data/sample_files.hpp>
#include <lockstep/data_parallel/optimizer.hpp>
#include <lockstep/lab/check_arithmetic.hpp>
#include <lockstep/lab/optimizers.hpp>
#include <lockstep/nn/tensor_files.hpp>
#include <lockstep/nn/weights.hpp>
#include <lockstep/optim/decay_groups.hpp>
#include <lockstep/trainer/fit.hpp>

#include "support/error_of.hpp"
#include "support/group_tests.hpp"
#include "support/scratch_folder.hpp"
#include "support/small_training.hpp"
#include "support/test_devices.hpp"

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

namespace fit_data_test {

using namespace lockstep;
using torch::Tensor;
namespace F = torch::nn::functional;
namespace nn = torch::nn;

// Words of a sentence count where the mask says so.
struct SentenceNet : nn::Module {
  SentenceNet() { to(torch::kDouble); }
  Tensor forward(const Batch& batch) {
    EXPECT_EQ(batch.x.scalar_type(), torch::kLong);
    const Tensor mask = batch["mask"].unsqueeze(2).to(torch::kDouble);
    return output((embedding(batch.x) * mask).sum(1) / mask.sum(1).clamp_min(1));
  }
  nn::Embedding embedding = register_module("embedding", nn::Embedding(20, 6));
  nn::Linear output = register_module("output", nn::Linear(6, 3));
};

Tensor weighted_loss(const Tensor& y_hat, const Batch& batch) {
  return (F::cross_entropy(y_hat, batch.y, F::CrossEntropyFuncOptions().reduction(torch::kNone)) * batch["weight"])
      .mean();
}

Dataset masked_sentences(int64_t samples, uint64_t seed) {
  torch::manual_seed(seed);
  const Tensor x = torch::randint(20, {samples, 5}), mask = torch::rand({samples, 5}) < 0.7;
  return {x, (x * mask).sum(1) % 3, {{"mask", mask}, {"weight", torch::rand({samples}, torch::kDouble) + 0.5}}};
}

Tensor by_class(const Tensor& y) {
  return torch::nn::functional::one_hot(y, 3).sum(0);
}
Tensor right_by_class(const Tensor& y_hat, const Tensor& y) {
  return torch::nn::functional::one_hot(y, 3).mul((y_hat.argmax(1) == y).unsqueeze(1)).sum(0);
}

Task masked() {
  return {.name = "sentences",
          .module = [] { return SentenceNet(); },
          .criterion = weighted_loss,
          .train = masked_sentences(50, 1),
          .test = masked_sentences(21, 2),
          .accuracy = true,
          .metrics = {{.name = "weighted right",
                       .of =
                           [](const Tensor& y_hat, const Batch& batch) {
                             return (y_hat.argmax(1) == batch.y).to(torch::kDouble) * batch["weight"];
                           }},
                      {.name = "recall", .of = lockstep::MeanOver(right_by_class, by_class)}}};
}

TrainOptions settings(int ranks) {
  TrainOptions options;
  options.devices = test_devices(static_cast<size_t>(ranks));
  options.batch.size = 16;  // the last batch has two samples
  options.rate.lr = 0.1;
  options.epochs = 3;
  return options;
}

void expect_same_history(const std::vector<EpochMetrics>& history, const std::vector<EpochMetrics>& expected) {
  ASSERT_EQ(history.size(), expected.size());
  for (size_t i = 0; i < history.size(); ++i) {
    EXPECT_EQ(history[i].weights, expected[i].weights);
    EXPECT_EQ(history[i].train_loss, expected[i].train_loss);
    EXPECT_EQ(history[i].test, expected[i].test);
  }
}

class FitDataWorlds : public Worlds {};
INSTANTIATE_TEST_SUITE_P(Sizes, FitDataWorlds, testing::Values(1, 2, 3, 4),
                         [](const auto& info) { return std::to_string(info.param) + "Ranks"; });

// ---- Batches of anything

TEST_P(FitDataWorlds, MasksAndWeightsGiveWhatLibTorchsLoopGives) {
  const ScratchFolder folder;
  const Task task = masked();
  TrainOptions options = settings(GetParam());
  options.batch.accumulate = 2;
  options.keep.run_dir = folder / "run";
  const auto history = fit(task, options).history;
  ASSERT_EQ(history.size(), 3u);

  torch::manual_seed(options.seed);
  SentenceNet net;
  torch::optim::SGD sgd(net.parameters(), 0.1);
  const Batch all{.x = task.test.tensors().x, .y = task.test.tensors().y, .more = task.test.tensors().more};
  for (int epoch = 1; epoch <= 3; ++epoch) {
    double losses = 0;
    for (auto& batch : batches(task.train, {.size = 16, .seed = options.seed, .epoch = epoch})) {
      sgd.zero_grad();
      const Tensor loss = weighted_loss(net.forward(batch), batch);
      loss.backward();
      sgd.step();
      losses += loss.item<double>() * static_cast<double>(batch.size());
    }
    const torch::NoGradGuard no_grad;
    const Tensor y_hat = net.forward(all), right = y_hat.argmax(1) == all.y;
    const EpochMetrics& metrics = history[static_cast<size_t>(epoch) - 1];
    EXPECT_NEAR(metrics.train_loss, losses / 50, 1e-10);
    EXPECT_NEAR(metrics.test.at("loss"), weighted_loss(y_hat, all).item<double>(), 1e-10);
    EXPECT_NEAR(metrics.test.at("weighted right"), (right * all["weight"]).mean().item<double>(), 1e-10);
    const Tensor recalls = right_by_class(y_hat, all.y) / by_class(all.y).to(torch::kDouble);
    EXPECT_NEAR(metrics.test.at("recall"), recalls.mean().item<double>(), 1e-10);
    EXPECT_NEAR(metrics.test_accuracy, right.to(torch::kDouble).mean().item<double>(), 1e-10);
  }
  if (this_process().index != 0) return;
  SentenceNet kept;
  load_weights(folder / "run/model.safetensors", kept);
  for (const auto& item : net.named_parameters())
    expect_near(kept.named_parameters()[item.key()], item.value(), 1e-10, item.key());
}

TEST_P(FitDataWorlds, ALoopOfOnesOwnGetsTheGradientsOfTheWholeBatch) {
  const Dataset data = masked_sentences(50, 1);
  on_ranks([&](Rank& rank) {
    const auto made = [&] {
      return rank.in_turn([] {
        torch::manual_seed(3);
        return std::make_shared<SentenceNet>();
      });
    };
    const auto alone = made();
    for (const int64_t grain : {0, 4}) {
      // With grains other ranks compute each grain again, for which they get the grain's masks too.
      DataParallel net(made(), rank, {.grain_check = grain > 0 ? lockstep::check_arithmetic(1) : nullptr});
      Batches whole = batches(data, {.size = 16, .seed = 1});
      auto expected = whole.begin();
      for (auto& batch : batches(data, {.size = 16, .seed = 1, .grain = grain}, rank)) {
        net->zero_grad();
        alone->zero_grad();
        weighted_loss(alone->forward(*expected), *expected).backward();
        net.loss(batch, weighted_loss).backward();
        for (const auto& item : alone->named_parameters())
          expect_near(net->named_parameters()[item.key()].grad(), item.value().grad(), 1e-12, item.key());
        ++expected;
      }
    }
  });
}

// A mean over words is none over samples; the guide counts words by hand.
TEST_P(FitDataWorlds, AMeanOverWordsIsTakenByTheirNumber) {
  const Dataset data = masked_sentences(40, 1);
  const auto of_words = [](SentenceNet& net, const Batch& batch) {
    const Tensor words = batch["mask"].sum(1).to(torch::kDouble);
    const auto each = F::CrossEntropyFuncOptions().reduction(torch::kNone);
    return (F::cross_entropy(net.forward(batch), batch.y, each) * words).sum() / words.sum();
  };
  const Batch whole = *batches(data, {.size = 40, .seed = 1}).begin();
  on_ranks([&](Rank& rank) {
    const auto made = [&] {
      return rank.in_turn([] {
        torch::manual_seed(3);
        return std::make_shared<SentenceNet>();
      });
    };
    const auto alone = made();
    of_words(*alone, whole).backward();
    DataParallel net(made(), rank);
    const Batch mine = *batches(data, {.size = 40, .seed = 1}, rank).begin();
    net.mean(of_words(*net, mine), mine["mask"].sum().item<int64_t>(), whole["mask"].sum().item<int64_t>()).backward();
    for (const auto& item : alone->named_parameters())
      expect_near(net->named_parameters()[item.key()].grad(), item.value().grad(), 1e-12, item.key());
  });
}

TEST(FitData, MasksHaveTheSameBitsOnAnyNumberOfRanks) {
  std::vector<EpochMetrics> expected;
  for (const int ranks : {1, 3}) {
    TrainOptions options = settings(ranks);
    options.batch.grain = 4;
    const auto history = fit(masked(), options).history;
    if (ranks == 1) expected = history;
    expect_same_history(history, expected);
  }
}

TEST(FitData, ACriterionOfABatchWorksInAPipeline) {
  Task task = masked();
  const Tensor x = torch::randn({50, 4}, torch::kDouble);
  task.train = Dataset{x, task.train.tensors().y, {{"weight", task.train.tensors().more.at("weight")}}};
  task.test = {};
  task.metrics = {};
  task.module = [] {
    nn::Sequential net(nn::Linear(4, 8), nn::Tanh(), nn::Linear(8, 3));
    net->to(torch::kDouble);
    return net;
  };
  const auto expected = fit(task, settings(1)).history;
  TrainOptions options = settings(2);
  options.way = lockstep::SplitNetwork{{.mesh = {.pipeline = 2}, .microbatches = 2}};
  const auto history = fit(task, options).history;
  for (size_t i = 0; i < 3; ++i) EXPECT_NEAR(history[i].train_loss, expected[i].train_loss, 1e-10);
}

// ---- Sample files

TEST_P(FitDataWorlds, FilesGiveWhatLibTorchsLoopGivesAndGoOnFromWithinAnEpoch) {
  const ScratchFolder folder;
  const Dataset all = masked_sentences(50, 1);
  for (int64_t first = 0; first < 50; first += 20) {
    Dataset::Tensors part{{"x", all.x}, {"y", all.y}, {"mask", all.more.at("mask")}, {"weight", all.more.at("weight")}};
    for (auto& [name, tensor] : part) tensor = tensor.slice(0, first, std::min<int64_t>(first + 20, 50));
    save_tensors(folder / ("part" + std::to_string(first) + ".safetensors"), part);
  }
  Task task = masked();
  task.train = samples_of(sample_files(folder.path()), {.shuffle_buffer = 15});
  TrainOptions options = settings(GetParam());
  options.optimizer.momentum = 0.9;
  options.keep.run_dir = folder / "run";
  options.keep.checkpoints = {.last = 100, .every = 3};
  const auto history = fit(task, options).history;

  torch::manual_seed(options.seed);
  SentenceNet net;
  torch::optim::SGD sgd(net.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  for (int epoch = 1; epoch <= 3; ++epoch) {
    double losses = 0;
    const Tensor order = task.train.order(options.seed, epoch);
    for (const Tensor& rows : order.split(16)) {
      Batch batch{.x = all.x.index_select(0, rows), .y = all.y.index_select(0, rows)};
      for (const auto& [name, tensor] : all.more) batch.more[name] = tensor.index_select(0, rows);
      sgd.zero_grad();
      const Tensor loss = weighted_loss(net.forward(batch), batch);
      loss.backward();
      sgd.step();
      losses += loss.item<double>() * static_cast<double>(batch.size());
    }
    EXPECT_NEAR(history[static_cast<size_t>(epoch) - 1].train_loss, losses / 50, 1e-10);
  }
  if (this_process().count > 1) return;
  TrainOptions again = options;
  again.keep.run_dir = folder / "again";
  again.keep.resume = folder / "run/checkpoints/epoch-0001-step-000003.safetensors";
  expect_same_history(fit(task, again).history, history);
  // Another buffer, and other files, are another order.
  again.keep.run_dir = folder / "other";
  task.train = samples_of(sample_files(folder.path()), {.shuffle_buffer = 16});
  EXPECT_THAT(error_of([&] { fit(task, again); }), Fails(Error::file, {}, {"train_labels"}));
}

// They are refused before the first step.
TEST_P(FitDataWorlds, ProcessesWithOtherFilesAreRefused) {
  const ScratchFolder folder;
  const Dataset all = masked_sentences(this_process().index > 0 ? 51 : 50, 1);
  Dataset::Tensors tensors = all.more;
  tensors.insert({{"x", all.x}, {"y", all.y}});
  save_tensors(folder / "part.safetensors", tensors);
  Task task = masked();
  task.train = samples_of({folder / "part.safetensors"});
  std::atomic<int> losses = 0;
  task.criterion = [&](const Tensor& y_hat, const Batch& batch) {
    ++losses;
    return weighted_loss(y_hat, batch);
  };
  const auto error = error_of([&] { fit(task, settings(GetParam())); });
  if (this_process().count == 1) {
    EXPECT_EQ(error, "(no error)");
    EXPECT_GT(losses.load(), 0);
  } else {
    EXPECT_THAT(error, Fails(Error::difference));
    EXPECT_EQ(losses.load(), 0);
  }
}

TEST(FitData, RanksWithOtherWeightsAreRefusedByBackward) {
  const Samples samples = masked_sentences(50, 1);
  const auto refused = [&](bool differ) {
    return error_on_ranks(2, [&](Rank& rank) {
      DataParallel net(rank.in_turn([] { return std::make_shared<SentenceNet>(); }), rank);
      const Samples weighted =
          samples.with_weights(torch::ones({50}) + (differ ? rank.index() : 0) * torch::arange(50));
      for (auto& batch : batches(weighted, {.size = 16}, rank)) net.loss(batch, weighted_loss).backward();
    });
  };
  EXPECT_EQ(refused(false), "(no error)");
  EXPECT_THAT(refused(true), Fails(Error::difference));
}

// ---- The update

TEST_P(FitDataWorlds, AnOptimizerAndAnAverageOfWeightsGiveWhatLibTorchsLoopGives) {
  Task task = masked();
  task.ema_decay = 0.8;
  task.optimizer = [](const auto& groups) {
    return std::make_unique<torch::optim::RMSprop>(groups, torch::optim::RMSpropOptions(1).alpha(0.9));
  };
  TrainOptions options = settings(GetParam());
  options.rate.lr = 0.01;

  torch::manual_seed(options.seed);
  SentenceNet net, averaged;
  torch::optim::RMSprop rmsprop(net.parameters(), torch::optim::RMSpropOptions(0.01).alpha(0.9));
  const Batch all{.x = task.test.tensors().x, .y = task.test.tensors().y, .more = task.test.tensors().more};
  std::vector<double> expected;
  bool is_first = true;
  for (int epoch = 1; epoch <= 3; ++epoch) {
    for (auto& batch : batches(task.train, {.size = 16, .seed = options.seed, .epoch = epoch})) {
      rmsprop.zero_grad();
      weighted_loss(net.forward(batch), batch).backward();
      rmsprop.step();
      const torch::NoGradGuard no_grad;
      auto averages = averaged.parameters();
      for (size_t i = 0; i < averages.size(); ++i) averages[i].lerp_(net.parameters()[i], is_first ? 1 : 1 - 0.8);
      is_first = false;
    }
    const torch::NoGradGuard no_grad;
    expected.push_back(weighted_loss(averaged.forward(all), all).item<double>());
  }

  for (const int stage : {0, 1, 2, 3}) {
    const ScratchFolder folder;
    options.way = static_cast<lockstep::Sharded>(stage);
    options.keep.run_dir = folder / "run";
    options.keep.checkpoints = {.last = 100, .every = 2};
    const auto history = fit(task, options).history;
    for (size_t i = 0; i < 3; ++i) EXPECT_NEAR(history[i].test.at("loss"), expected[i], 1e-10) << "stage " << stage;
    if (this_process().count > 1) continue;
    SentenceNet kept;  // the evaluated net
    load_weights(folder / "run/model.safetensors", kept);
    EXPECT_EQ(weights_hash(kept), history[2].weights);
    for (const auto& item : averaged.named_parameters())
      expect_near(kept.named_parameters()[item.key()], item.value(), 1e-10, item.key());
    // From within an epoch and between two, at another stage.
    for (const std::string from : {"epoch-0001-step-000002", "epoch-0002"}) {
      TrainOptions again = options;
      again.way = static_cast<lockstep::Sharded>((stage + 2) % 4);
      again.keep.run_dir = folder / ("from-" + from);
      again.keep.resume = folder / ("run/checkpoints/" + from + ".safetensors");
      const auto gone_on = fit(task, again).history;
      ASSERT_EQ(gone_on.size(), 3u);
      EXPECT_EQ(gone_on[2].weights, history[2].weights) << from << " stage " << stage;
      EXPECT_EQ(gone_on[2].train_loss, history[2].train_loss) << from << " stage " << stage;
    }
  }
}

TEST(FitData, AnAverageHasTheSameBitsOnAnyNumberOfRanks) {
  Task task = masked();
  task.ema_decay = 0.9;
  std::vector<EpochMetrics> expected;
  for (const int ranks : {1, 3}) {
    TrainOptions options = settings(ranks);
    options.batch.grain = 4;
    const auto history = fit(task, options).history;
    if (ranks == 1) expected = history;
    expect_same_history(history, expected);
  }
  task.ema_decay = 0;
  TrainOptions options = settings(1);
  options.batch.grain = 4;
  EXPECT_NE(fit(task, options).history[0].weights, expected[0].weights);
}

TEST(FitData, AnAverageOfASplitNetworkGoesOn) {
  Task task = masked();
  task.train = Dataset{torch::randn({50, 4}, torch::kDouble), task.train.tensors().y};
  task.test = Dataset{torch::randn({21, 4}, torch::kDouble), task.test.tensors().y};
  task.metrics = {};
  task.criterion = F::cross_entropy;
  task.ema_decay = 0.8;
  task.module = [] {
    nn::Sequential net(nn::Linear(4, 8), nn::Tanh(), nn::Linear(8, 3));
    net->to(torch::kDouble);
    return net;
  };
  const auto expected = fit(task, settings(1)).history;
  const ScratchFolder folder;
  TrainOptions options = settings(2);
  options.way = lockstep::SplitNetwork{{.mesh = {.pipeline = 2}, .microbatches = 2}};
  options.keep.run_dir = folder / "run";
  options.keep.checkpoints = {.last = 100, .every = 2};
  const auto history = fit(task, options).history;
  for (size_t i = 0; i < 3; ++i) EXPECT_NEAR(history[i].test.at("loss"), expected[i].test.at("loss"), 1e-10);
  options.keep.run_dir = folder / "again";
  options.keep.resume = folder / "run/checkpoints/epoch-0001-step-000002.safetensors";
  expect_same_history(fit(task, options).history, history);
}

// Matrices decay, biases do not; with every stage, and from a checkpoint of another one.
TEST_P(FitDataWorlds, GroupsOfParametersGiveWhatLibTorchsLoopGives) {
  const auto make = [](const Task::Groups& groups) {
    auto adamw = std::make_unique<torch::optim::AdamW>(groups, torch::optim::AdamWOptions(0.02).weight_decay(0.5));
    lockstep::Optimizer::set_weight_decay(adamw->param_groups().at(1), 0);
    return adamw;
  };
  Task task = masked();
  task.groups = decay_groups;
  task.optimizer = make;
  TrainOptions options = settings(GetParam());
  options.rate.lr = 0.02;

  torch::manual_seed(options.seed);
  SentenceNet net;
  const auto adamw = make(decay_groups(net));
  for (int epoch = 1; epoch <= 3; ++epoch) {
    for (auto& batch : batches(task.train, {.size = 16, .seed = options.seed, .epoch = epoch})) {
      adamw->zero_grad();
      weighted_loss(net.forward(batch), batch).backward();
      adamw->step();
    }
  }
  const auto expect_the_same = [&](const std::filesystem::path& run, int stage) {
    if (this_process().index != 0) return;
    SentenceNet kept;
    load_weights(run / "model.safetensors", kept);
    for (const auto& item : net.named_parameters()) {
      expect_near(kept.named_parameters()[item.key()], item.value(), 1e-10,
                  item.key() + ", stage " + std::to_string(stage));
    }
  };
  for (const int stage : {0, 1, 2, 3}) {
    const ScratchFolder folder;
    options.way = static_cast<lockstep::Sharded>(stage);
    options.keep.run_dir = folder / "run";
    options.keep.resume.clear();
    fit(task, options);
    expect_the_same(folder / "run", stage);
    if (this_process().count > 1) continue;
    TrainOptions again = options;
    again.way = static_cast<lockstep::Sharded>((stage + 2) % 4);
    again.keep.run_dir = folder / "again";
    again.keep.resume = folder / "run/checkpoints/epoch-0002.safetensors";
    fit(task, again);
    expect_the_same(folder / "again", stage);
  }
}

// ---- fit() and train()

class FitAndTrain : public SmallTraining {};

TEST_F(FitAndTrain, GiveTheSameBits) {
  for (const int ranks : {1, 2}) {
    TrainOptions of_lockstep = options(ranks, "train" + std::to_string(ranks));
    of_lockstep.epochs = 2;
    const auto expected = train(of_lockstep).history;
    const ImageData data = load_fashion_mnist(images_.path());
    TrainOptions own = of_lockstep;
    own.model = {};
    own.data = {};
    own.keep.run_dir = runs_ / ("fit" + std::to_string(ranks));
    const auto history = fit({.name = "mine",
                              .module = [&](uint64_t seed) { return make_model(of_lockstep.model, seed); },
                              .criterion = F::cross_entropy,
                              .train = data.train,
                              .test = data.test,
                              .accuracy = true},
                             own)
                             .history;
    expect_same_history(history, expected);
    EXPECT_EQ(history[1].test_accuracy, expected[1].test_accuracy);
  }
}

}  // namespace fit_data_test
