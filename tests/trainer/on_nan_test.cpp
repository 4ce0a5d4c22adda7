// NaN in one sample: all ranks stop or skip in the same step, say which rank it was, and what is kept is of before.
#include "data_parallel/averaged_gradients.hpp"

#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/data_parallel/optimizer.hpp>
#include <lockstep/nn/tensor_files.hpp>
#include <lockstep/nn/weights.hpp>

#include "support/error_of.hpp"
#include "support/small_nets.hpp"
#include "support/small_training.hpp"
#include "support/test_devices.hpp"
#include "trainer/rank_trainer.hpp"
#include "trainer/workload.hpp"

#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace lockstep {
namespace on_nan_test {

using testing::AllOf;
using testing::Each;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using torch::Tensor;

constexpr int64_t kSpoilt = 33;  // the sample

ImageData spoilt_images() {
  ImageData data = synthetic_images(150, 40);
  data.train.x = data.train.x.to(torch::kFloat) / 255;
  data.train.x[kSpoilt].fill_(std::numeric_limits<float>::quiet_NaN());
  return data;
}

TrainOptions options_for(OnNan on_nan) {
  TrainOptions options;
  options.model.name = "mlp";
  options.model.width = 0.125;
  options.batch.size = 32;
  options.rate.lr = 0.05;
  options.epochs = 2;
  options.on_nan = on_nan;
  return options;
}

// The step of epoch 1, from 1, and the rank that get the sample.
std::pair<int, int> place_of_spoilt(const ImageData& data, const TrainOptions& options, int ranks) {
  for (int rank = 0; rank < ranks; ++rank) {
    int step = 0;
    for (auto& batch :
         batches(data.train, {.size = options.batch.size, .seed = options.seed, .epoch = 1}, {rank, ranks})) {
      ++step;
      if (batch.x.isnan().any().item<bool>()) return {step, rank};
    }
  }
  return {};
}

struct Outcome {
  std::vector<std::string> why;  // reason of each rank
  std::vector<EpochMetrics> history;
  std::vector<std::string> warnings;
  std::vector<Tensor> state;  // whole state of rank 0
};

Outcome train(int ranks, const TrainOptions& options, const ImageData& data) {
  Outcome outcome;
  outcome.why.resize(static_cast<size_t>(ranks));
  TrainCallbacks callbacks;
  callbacks.on_warning = [&](const std::string& text) { outcome.warnings.push_back(text); };
  run(test_devices(ranks), [&](Rank& rank) {
    RankTrainer trainer(options, callbacks, task_of(options, data), rank, nullptr, nullptr);
    std::vector<EpochMetrics> history;
    for (int epoch = 1; epoch <= options.epochs && trainer.not_finite().empty(); ++epoch) {
      history.push_back(trainer.epoch(epoch));
    }
    outcome.why[static_cast<size_t>(rank.index())] = trainer.not_finite();
    auto whole = trainer.whole();
    if (rank.index() != 0) return;
    outcome.history = history;
    for (const auto& tensor : whole->parameters()) outcome.state.push_back(on_host(tensor));
    for (const auto& tensor : whole->buffers()) outcome.state.push_back(on_host(tensor));
  });
  return outcome;
}

bool all_finite(const std::vector<Tensor>& tensors) {
  for (const auto& tensor : tensors) {
    if (!tensor.isfinite().all().item<bool>()) return false;
  }
  return true;
}

TEST(OnNan, StopsAllRanksInTheSameStepAndNamesTheRank) {
  const ImageData data = spoilt_images();
  for (const int ranks : {1, 2, 3}) {
    SCOPED_TRACE(ranks);
    for (const int accumulate : {1, 2}) {
      TrainOptions options = options_for(OnNan::stop);
      options.batch.accumulate = accumulate;
      const auto [step, rank] = place_of_spoilt(data, options, ranks);
      const Outcome outcome = train(ranks, options, data);
      EXPECT_THAT(outcome.why, Each("epoch 1, step " + std::to_string(step) + ": the loss of rank " +
                                    std::to_string(rank) + " is not finite"));
      EXPECT_TRUE(all_finite(outcome.state));  // the step was not taken
    }
  }
}

TEST(OnNan, StopsHoweverTheRunIsSplitAndExchanges) {
  const ImageData data = spoilt_images();
  std::vector<TrainOptions> list(6, options_for(OnNan::stop));
  list[0].way = SplitNetwork{{.mesh = {.pipeline = 2}, .microbatches = 2}};
  list[1].way = SplitNetwork{{.mesh = {.tensor = 2}}};
  list[2].way = Sharded::state;
  list[3].way = Sharded::gradients;
  list[4].way = Averaged{Rounding::bf16};
  list[5].way = LocalSgdOptions{2};
  for (size_t i = 0; i < list.size(); ++i) {
    SCOPED_TRACE(i);
    const int parts = std::holds_alternative<SplitNetwork>(list[i].way) ? 1 : 2;
    const auto [step, rank] = place_of_spoilt(data, list[i], parts);
    const Outcome outcome = train(2, list[i], data);
    const int asked = i == 5 ? std::min(5, (step + 1) / 2 * 2) : step;  // at the end of a round
    const std::string ranks = i == 1 ? "0, 1" : i == 0 ? "0, 1" : std::to_string(rank);
    EXPECT_THAT(outcome.why,
                Each("epoch 1, step " + std::to_string(asked) + ": the loss of rank " + ranks + " is not finite"));
  }
}

TEST(OnNan, SkipsThatStepAloneOnAllRanks) {
  const ImageData data = spoilt_images();
  for (const std::string model : {"mlp", "resnet18"}) {
    for (const int ranks : {1, 3}) {
      SCOPED_TRACE(model + " on " + std::to_string(ranks));
      TrainOptions options = options_for(OnNan::skip);
      options.model.name = model;
      if (model == "resnet18") options.model.width = 0.05, options.epochs = 1;
      options.optimizer.momentum = 0.9;
      const auto [step, rank] = place_of_spoilt(data, options, ranks);
      const Outcome outcome = train(ranks, options, data);
      EXPECT_THAT(outcome.why, Each(IsEmpty()));
      ASSERT_EQ(outcome.warnings.size(), static_cast<size_t>(options.epochs));  // one step in each
      EXPECT_THAT(outcome.warnings[0], AllOf(HasSubstr("epoch 1, step " + std::to_string(step) + ": the loss of rank " +
                                                       std::to_string(rank)),
                                             HasSubstr("was skipped")));
      EXPECT_TRUE(all_finite(outcome.state));
      for (const auto& metrics : outcome.history) EXPECT_TRUE(std::isfinite(metrics.train_loss));
    }
  }
}

// The batches without the spoilt sample train what they train without the spoilt batch.
TEST(OnNan, ASkippedStepChangesNothing) {
  const ImageData data = spoilt_images();
  TrainOptions options = options_for(OnNan::skip);
  options.epochs = 1;
  options.optimizer.momentum = 0.9;
  const int step = place_of_spoilt(data, options, 1).first;
  auto net = make_model({.name = "mlp", .width = 0.125}, options.seed);
  torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(*options.rate.lr).momentum(0.9));
  double loss_sum = 0, samples = 0;
  int number = 0;
  for (auto& batch : batches(data.train, {.size = 32, .seed = options.seed, .epoch = 1})) {
    if (++number == step) continue;
    sgd.zero_grad();
    const Tensor loss = torch::nn::functional::cross_entropy(net->forward(batch.x), batch.y);
    loss.backward();
    sgd.step();
    loss_sum += loss.item<double>() * static_cast<double>(batch.size());
    samples += static_cast<double>(batch.size());
  }
  const auto expected = net->parameters();
  for (const int ranks : {1, 2}) {
    const Outcome outcome = train(ranks, options, data);
    EXPECT_NEAR(outcome.history[0].train_loss, loss_sum / samples, 1e-5);
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(torch::allclose(outcome.state[i], expected[i], 1e-4, 1e-6)) << i;
    }
  }
}

TEST(OnNan, ARunGoesOnWithWhatItHasSkipped) {
  const ImageData data = spoilt_images();
  TrainOptions options = options_for(OnNan::skip);
  options.epochs = 1;
  options.keep.checkpoints->every = 1;
  const int step = place_of_spoilt(data, options, 2).first;
  ASSERT_LT(step, 5);
  run(test_devices(2), [&](Rank& rank) {
    const TrainCallbacks callbacks;
    RankTrainer trainer(options, callbacks, task_of(options, data), rank, nullptr, nullptr);
    std::optional<RunState> state;
    int steps = 0;
    const EpochMetrics expected = trainer.epoch(1, [&] {
      RunState now = trainer.state();
      if (++steps != step) return;
      for (auto& [name, tensor] : now.tensors) tensor = tensor.detach().clone();  // it is not written, and trains on
      state = std::move(now);
    });
    RankTrainer resumed(options, callbacks, task_of(options, data), rank, nullptr, nullptr, &*state);
    const EpochMetrics metrics = resumed.epoch(1, [] {});
    EXPECT_EQ(metrics.train_loss, expected.train_loss);
    EXPECT_EQ(metrics.train_accuracy, expected.train_accuracy);
    EXPECT_EQ(metrics.test_accuracy, expected.test_accuracy);
  });
}

// Another process may be gone just then. The others begin the step again, and do not count it as done. (On a GPU the
// weights are spoilt by then, and the next step tells.)
TEST(OnNan, TheStepIsNoWholeOneOfAnElasticJob) {
  const ImageData data = spoilt_images();
  TrainOptions options = options_for(OnNan::stop);
  options.batch.grain = 8;
  const TrainCallbacks callbacks;
  run(Devices(2, torch::kCPU), [&](Rank& rank) {
    RankTrainer trainer(options, callbacks, task_of(options, data), rank, nullptr, nullptr);
    trainer.be_elastic({});
    trainer.epoch(1);
    EXPECT_THAT(trainer.not_finite(), HasSubstr("not finite"));
    EXPECT_EQ(trainer.whole_steps().steps, place_of_spoilt(data, options, 1).first - 1);
  });
}

TEST(OnNan, ARunGoesOnWhoseAverageOfWeightsHasNotBegun) {
  const ImageData data = spoilt_images();
  TrainOptions options = options_for(OnNan::skip);
  while (place_of_spoilt(data, options, 1).first != 1) ++options.seed;
  options.keep.checkpoints->every = 1;
  TrainCallbacks callbacks;
  callbacks.on_warning = [](const std::string&) {};
  Task task = task_of(options, data);
  task.ema_decay = 0.9;
  run(test_devices(1), [&](Rank& rank) {
    std::optional<RunState> first;
    RankTrainer trainer(options, callbacks, task, rank, nullptr, nullptr);
    trainer.epoch(1, [&] {
      RunState state = trainer.state();
      if (first) return;
      for (auto& [name, tensor] : state.tensors) tensor = tensor.clone();
      first = std::move(state);
    });
    ASSERT_EQ(first->steps, 1);
    RankTrainer again(options, callbacks, task, rank, nullptr, nullptr, &*first);
    again.epoch(1);
    EXPECT_EQ(weights_hash(*again.whole()), weights_hash(*trainer.whole()));
  });
}

TEST(OnNan, AnEpochOfSkippedStepsEndsTheRun) {
  ImageData data = spoilt_images();
  data.train.x.fill_(std::numeric_limits<float>::quiet_NaN());
  const Outcome outcome = train(2, options_for(OnNan::skip), data);
  EXPECT_THAT(outcome.why, Each(HasSubstr("epoch 1: every step was skipped")));
  EXPECT_EQ(outcome.history.size(), 1u);
  EXPECT_EQ(outcome.history[0].train_loss, 0);
  EXPECT_TRUE(all_finite(outcome.state));
}

TEST(OnNan, GoesOnIfAsked) {
  const Outcome outcome = train(2, options_for(OnNan::go_on), spoilt_images());
  EXPECT_THAT(outcome.why, Each(IsEmpty()));
  EXPECT_FALSE(all_finite(outcome.state));
}

// ---- train(), which keeps runs.

class OnNanTraining : public SmallTraining {
 protected:
  // From epoch 2 on, the learning rate is far too large: the second step of it has no finite loss.
  TrainOptions wild(int ranks, const std::string& name) const {
    TrainOptions settings = options(ranks, name);
    settings.rate.schedule = LearningRate::Schedule::step;
    settings.rate.step_epochs = {1};
    settings.rate.step_factor = 1e30;
    return settings;
  }
};

TEST_F(OnNanTraining, KeepsTheLastGoodWeights) {
  TrainOptions good = options(2, "good");
  good.epochs = 1;
  lockstep::train(good);
  int epochs = 0;
  TrainCallbacks callbacks;
  callbacks.on_epoch = [&](const EpochMetrics&) { ++epochs; };
  EXPECT_THAT(error_of([&] { lockstep::train(wild(2, "wild"), callbacks); }), Fails(Error::not_finite));
  EXPECT_EQ(epochs, 1);
  EXPECT_EQ(runs_.read("wild/model.safetensors"), runs_.read("good/model.safetensors"));
}

// ---- In a loop of one's own.

constexpr double kWrong[] = {std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN(), 0.0};

TEST(HasFiniteGradients, IsTheSameOnAllRanks) {
  for (const double wrong : kWrong) {
    for (const bool average : {true, false}) {
      std::vector<int> finite(3);
      run(test_devices(3), [&](Rank& rank) {
        DataParallel net(torch::nn::Linear(4, 2), rank, {.average = average});
        EXPECT_TRUE(has_finite_gradients(*net.trained()));  // there are none
        Tensor x = torch::ones({2, 4});
        if (rank.index() == 1) x[0][0] += wrong;
        net.mean(net(x).sum(), 2, 6).backward();
        finite[static_cast<size_t>(rank.index())] = has_finite_gradients(*net.trained()) ? 1 : 0;
      });
      EXPECT_THAT(finite, Each(wrong == 0 ? 1 : 0)) << average;
    }
  }
}

// The wrong number is in one rank's slice, and none of it in .grad. A step that is not taken changes nothing.
TEST(HasFiniteGradients, SeesTheSlicesOfAShardedNet) {
  for (const double wrong : kWrong) {
    for (const int stage : {1, 2, 3}) {
      std::vector<int> taken(3);
      run(test_devices(3), [&](Rank& rank) {
        DataParallel net(torch::nn::Linear(40, 2), rank, {.sharded = static_cast<Sharded>(stage)});
        Optimizer sgd(net, torch::optim::SGDOptions(0.1));
        EXPECT_THAT(error_of([&] { sgd.step({.skip_not_finite = true}); }), Refused());
        Tensor x = torch::ones({2, 40});
        if (rank.index() == 1) x[0][0] += wrong;
        net.mean(net(x).sum(), 2, 6).backward();
        taken[static_cast<size_t>(rank.index())] = sgd.step({.skip_not_finite = true}).taken ? 1 : 0;
        const auto whole = net.whole();
        EXPECT_TRUE(all_finite(net->parameters()));
      });
      EXPECT_THAT(taken, Each(wrong == 0 ? 1 : 0)) << stage;
    }
  }
}

// The last layer's gradient alone is wrong, and one rank of the pipeline has it.
TEST(HasFiniteGradients, SeesTheOtherStagesOfASplitModel) {
  for (const double wrong : kWrong) {
    std::vector<int> finite(2);
    run(test_devices(2), [&](Rank& rank) {
      const auto layers =
          rank.in_turn([] { return torch::nn::Sequential(torch::nn::Linear(4, 4), torch::nn::Linear(4, 4)); });
      SplitModel net(layers, rank, {.mesh = {.pipeline = 2}});
      Optimizer sgd(net, torch::optim::SGDOptions(0.1));
      net.loss({torch::ones({2, 4}), torch::zeros({2}, torch::kLong), 2}, torch::nn::functional::cross_entropy)
          .backward();
      if (rank.index() == 1) sgd.gradients()[0].add_(wrong);
      finite[static_cast<size_t>(rank.index())] = sgd.step({.skip_not_finite = true}).taken ? 1 : 0;
    });
    EXPECT_THAT(finite, Each(wrong == 0 ? 1 : 0));
  }
}

}  // namespace on_nan_test
}  // namespace lockstep
