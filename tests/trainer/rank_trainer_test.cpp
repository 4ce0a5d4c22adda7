// Labels: concurrency long
// RankTrainer with recorded steps, on a stand-in for the graph: the steps around a recording are those of a run
// without.
#include "trainer/rank_trainer.hpp"

#include <gmock/gmock.h>
#include <torch/torch.h>

#include "lab/graphed_step.hpp"
#include "ranks/observed_backend.hpp"
#include "support/error_of.hpp"
#include "support/fake_graph.hpp"
#include "support/test_devices.hpp"
#include "trainer/workload.hpp"

#include <cmath>
#include <functional>
#include <memory>
#include <stop_token>
#include <string>
#include <utility>
#include <vector>

namespace rank_trainer_test {

using lockstep::EpochMetrics;
using lockstep::Error;
using lockstep::Fails;
using lockstep::Rank;
using lockstep::Refused;
using lockstep::TrainOptions;

struct Outcome {
  std::vector<EpochMetrics> history;
  std::vector<torch::Tensor> weights;
  int replays = 0;
};

// On `ranks` CPU ranks, with rank 0's outcome.
Outcome train(int ranks, const TrainOptions& options, bool graphed,
              const std::function<void(const lockstep::NextStep&)>& before_step = {}) {
  const auto data = lockstep::synthetic_images(150, 40);
  Outcome outcome;
  lockstep::run(lockstep::test_devices(ranks), [&](Rank& rank) {
    int replays = 0;
    const lockstep::TrainCallbacks callbacks;
    lockstep::Task task = task_of(options, data);
    task.before_step = before_step;
    lockstep::RankTrainer trainer(options, callbacks, task, rank, nullptr,
                                  graphed ? std::make_unique<lockstep::FakeGraph>(&replays) : nullptr);
    std::vector<EpochMetrics> history;
    for (int epoch = 1; epoch <= options.epochs; ++epoch) history.push_back(trainer.epoch(epoch));
    if (rank.index() == 0) outcome = {history, trainer.whole()->parameters(), replays};
  });
  return outcome;
}

// Also with a rate of each step's own and a forward in between.
TEST(RankTrainer, RecordedStepsGiveWhatOtherStepsGive) {
  TrainOptions options;
  options.batch.size = 32;
  options.epochs = 3;
  const std::function<void(const lockstep::NextStep&)> before_step = [](const lockstep::NextStep& next) {
    next.optimizer.set_lr(next.done % 2 == 0 ? 0.3 : 0.05);
    next.net.eval();
    EXPECT_EQ(next.net.forward(torch::ones({1, 1, 28, 28}).to(next.rank.device())).size(0), 1);
  };
  for (const auto& [ranks, sets_rates] : {std::pair(1, false), {2, false}, {3, false}, {1, true}, {3, true}}) {
    SCOPED_TRACE(std::to_string(ranks) + (sets_rates ? " with before_step" : ""));
    const auto function = sets_rates ? before_step : std::function<void(const lockstep::NextStep&)>();
    const Outcome expected = train(ranks, options, false, function), outcome = train(ranks, options, true, function);
    EXPECT_EQ(outcome.history[0].lr == 0.3, sets_rates);  // the fifth step's rate
    EXPECT_EQ(expected.replays, 0);
    EXPECT_EQ(outcome.replays, 3 * 4 - lockstep::kWarmUpSteps);  // 4 full batches and one of 22 samples
    for (size_t i = 0; i < expected.history.size(); ++i) {
      EXPECT_EQ(outcome.history[i].train_loss, expected.history[i].train_loss);
      EXPECT_EQ(outcome.history[i].train_accuracy, expected.history[i].train_accuracy);
      EXPECT_EQ(outcome.history[i].test_accuracy, expected.history[i].test_accuracy);
    }
    for (size_t i = 0; i < expected.weights.size(); ++i) {
      EXPECT_TRUE(torch::equal(outcome.weights[i], expected.weights[i])) << "weight " << i;
    }
  }
}

TEST(RankTrainer, WeightsThatDifferEndTheRunAndTheRankIsNamed) {
  const auto data = lockstep::synthetic_images(150, 40);
  TrainOptions options{.model = {.name = "mlp", .width = 0.125}, .batch = {.size = 32}};
  const auto errors = [&](int64_t every) {
    options.check_replicas = every;
    std::vector<lockstep::Caught> errors(3);
    lockstep::run(lockstep::test_devices(3), [&](Rank& rank) {
      const lockstep::TrainCallbacks callbacks;
      lockstep::RankTrainer trainer(options, callbacks, task_of(options, data), rank, nullptr, nullptr);
      trainer.epoch(1);
      const torch::NoGradGuard no_grad;
      if (rank.index() == 2) trainer.whole()->parameters()[1].add_(1);
      const torch::AutoGradMode grad(true);
      errors[static_cast<size_t>(rank.index())] = lockstep::error_of([&] { trainer.epoch(2); });
    });
    return errors;
  };
  for (const int64_t every : {-1, 1, 5, 6}) {  // an epoch has 5 steps
    EXPECT_THAT(errors(every), testing::Each(Fails(Error::difference, {2}))) << every;
  }
  EXPECT_THAT(errors(0), testing::Each("(no error)"));
}

// Flips a bit as memory does: LibTorch does not count this as a write.
void flip_a_bit(const torch::Tensor& tensor) {
  const torch::NoGradGuard no_grad;
  tensor.variable_data().as_strided({1}, {1}).view(torch::kInt).bitwise_xor_(1 << 22);
}

// The task with Adam, of which `made` then tells where it is.
lockstep::Task with_adam(lockstep::Task task, torch::optim::Optimizer*& made) {
  task.optimizer = [&made](const lockstep::Task::Groups& groups) {
    auto adam = std::make_unique<torch::optim::Adam>(groups);
    made = adam.get();
    return adam;
  };
  return task;
}

// Gives that of the last parameter with a state: biases, which have no zeros whose flipped bits would be rounded away.
torch::Tensor last_exp_avg(torch::optim::Optimizer& adam) {
  torch::Tensor last;
  for (const auto& parameter : adam.param_groups().back().params()) {
    const auto found = adam.state().find(parameter.unsafeGetTensorImpl());
    if (found == adam.state().end() || parameter.numel() == 0) continue;
    last = static_cast<torch::optim::AdamParamState&>(*found->second).exp_avg();
  }
  return last;
}

// A bit of the weights, or of the optimizer's state, which the first step makes.
TEST(RankTrainer, AFlippedBitIsFoundWithinSoManyStepsWhicheverStepItComesIn) {
  const auto data = lockstep::synthetic_images(150, 40);
  TrainOptions options{.model = {.name = "mlp", .width = 0.125}, .batch = {.size = 32}};  // 5 steps in an epoch
  const auto expect_found = [&](int flips_in, bool of_state) {
    SCOPED_TRACE(std::to_string(flips_in) + ", every " + std::to_string(options.check_replicas) +
                 (of_state ? ", exp_avg" : ", weights"));
    int found_in = 0;
    lockstep::run({torch::kCPU, torch::kCPU, torch::kCPU}, [&](Rank& rank) {
      const lockstep::TrainCallbacks callbacks;
      torch::optim::Optimizer* adam = nullptr;
      lockstep::RankTrainer trainer(options, callbacks, with_adam(task_of(options, data), adam), rank, nullptr,
                                    nullptr);
      const torch::Tensor parameter = trainer.whole()->parameters()[0];
      int step = 0;
      parameter.register_hook([&](const torch::Tensor&) {
        if (++step == flips_in && rank.index() == 2) flip_a_bit(of_state ? last_exp_avg(*adam) : parameter);
      });
      const auto error = lockstep::error_of([&] {
        trainer.epoch(1);
        trainer.epoch(2);
      });
      EXPECT_THAT(error, Fails(Error::difference));
      if (rank.index() == 0) found_in = step;
    });
    EXPECT_LT(found_in - flips_in, options.check_replicas);
  };
  for (options.check_replicas = 1; options.check_replicas <= 7; options.check_replicas += 3) {
    for (int flips_in = 1; flips_in <= 10; ++flips_in) {
      expect_found(flips_in, /*of_state=*/false);
      if (flips_in > 1) expect_found(flips_in, /*of_state=*/true);
    }
  }
}

TEST(RankTrainer, OfTwoRanksTheOneWhoseMemoryHasChangedBetweenTwoEpochsIsNamed) {
  const auto data = lockstep::synthetic_images(150, 40);
  TrainOptions options{.model = {.name = "mlp", .width = 0.125}, .batch = {.size = 32}};
  options.check_replicas = 1;
  lockstep::run(lockstep::test_devices(2), [&](Rank& rank) {
    const lockstep::TrainCallbacks callbacks;
    lockstep::RankTrainer trainer(options, callbacks, task_of(options, data), rank, nullptr, nullptr);
    trainer.epoch(1);
    const torch::NoGradGuard no_grad;
    if (rank.index() == 1) trainer.whole()->parameters()[1].add_(1);
    const torch::AutoGradMode grad(true);
    EXPECT_THAT(lockstep::error_of([&] { trainer.epoch(2); }), Fails(Error::difference, {1}));
  });
}

// With grains they are the same on all ranks; else each rank's follow its own samples.
TEST(RankTrainer, RunningStatisticsThatDifferWithGrainsEndTheRunAndTheRankIsNamed) {
  const auto data = lockstep::synthetic_images(64, 8);
  TrainOptions options{.model = {.name = "resnet18", .width = 0.05}, .batch = {.size = 32}};
  for (const auto& [grain, every] : {std::pair(8, -1), std::pair(8, 1), std::pair(0, 1)}) {
    SCOPED_TRACE("grain " + std::to_string(grain) + ", every " + std::to_string(every));
    options.batch.grain.reset();
    if (grain > 0) options.batch.grain = grain;
    options.check_replicas = every;
    lockstep::run({torch::kCPU, torch::kCPU, torch::kCPU}, [&](Rank& rank) {
      const lockstep::TrainCallbacks callbacks;
      lockstep::RankTrainer trainer(options, callbacks, task_of(options, data), rank, nullptr, nullptr);
      trainer.epoch(1);
      if (rank.index() == 2) flip_a_bit(trainer.whole()->buffers()[0]);
      const auto error = lockstep::error_of([&] { trainer.epoch(2); });
      if (!options.batch.grain) EXPECT_EQ(error, "(no error)");
      if (options.batch.grain) EXPECT_THAT(error, Fails(Error::difference, {2}));
    });
  }
}

// The errors of the ranks' trainers, with Adam, if rank `odd` calls flip(its optimizer) behind the second step; odd -1:
// none does.
using Flip = std::function<void(torch::optim::Optimizer&)>;
std::vector<lockstep::Caught> errors_after_flip(int ranks, int odd, TrainOptions options, const Flip& flip) {
  const auto data = lockstep::synthetic_images(150, 40);
  options.batch.size = 32;  // 5 steps in an epoch
  options.keep.checkpoints->every = 1;
  std::vector<lockstep::Caught> errors(static_cast<size_t>(ranks));
  lockstep::run(lockstep::test_devices(ranks), [&](Rank& rank) {
    const lockstep::TrainCallbacks callbacks;
    torch::optim::Optimizer* made = nullptr;
    lockstep::RankTrainer trainer(options, callbacks, with_adam(task_of(options, data), made), rank, nullptr, nullptr);
    int kept = 0;
    const auto between_steps = [&] {
      if (++kept == 2 && rank.index() == odd) flip(*made);
    };
    errors[static_cast<size_t>(rank.index())] = lockstep::error_of([&] {
      trainer.epoch(1, between_steps);
      trainer.epoch(2, between_steps);
    });
  });
  return errors;
}

TEST(RankTrainer, AFlippedBitOfWhatOneRankAloneHasIsFoundAndTheRankIsNamed) {
  const Flip of_state = [](auto& adam) { flip_a_bit(last_exp_avg(adam)); };
  const Flip of_weights = [](auto& adam) { flip_a_bit(adam.param_groups()[0].params()[0]); };
  struct Case {
    std::string name;
    int ranks;
    TrainOptions options;
    bool weights_too = true;  // weights that no other rank has
    int64_t every = 3;
  };
  const auto split_by = [](const lockstep::MeshShape& mesh) {
    return TrainOptions{.way = lockstep::SplitNetwork{{.mesh = mesh}}};
  };
  const auto going = [](const lockstep::Way& way) { return TrainOptions{.way = way}; };
  const std::vector<Case> cases = {
      {"one rank", 1, {}},
      {"ZeRO 1", 3, going(lockstep::Sharded::state), false},
      {"ZeRO 1 of two ranks", 2, going(lockstep::Sharded::state), false},
      {"ZeRO 2", 3, going(lockstep::Sharded::gradients), false},
      {"ZeRO 3", 3, going(lockstep::Sharded::parameters)},
      {"pipeline", 2, split_by({.pipeline = 2})},
      {"channels", 2, split_by({.tensor = 2})},
      {"pipeline and channels", 4, split_by({.pipeline = 2, .tensor = 2})},
      {"local SGD", 3, going(lockstep::LocalSgdOptions{2}), true, 5},  // it keeps where a round ends
  };
  for (const Case& layout : cases) {
    SCOPED_TRACE(layout.name);
    TrainOptions options = layout.options;
    options.model = {.name = "mlp", .width = 0.125};
    const auto expect_all = [&](const Flip& flip, int odd, int64_t every, const auto& error) {
      options.check_replicas = every;
      EXPECT_THAT(errors_after_flip(layout.ranks, odd, options, flip), testing::Each(error)) << "every " << every;
    };
    const auto named = [&](int odd) {  // none is named where all are
      return Fails(Error::difference, layout.ranks > 1 ? std::vector{odd} : std::vector<int>());
    };
    const int last = layout.ranks - 1;
    expect_all(of_state, -1, 1, "(no error)");
    expect_all(of_state, last, 0, "(no error)");
    expect_all(of_state, last, 1, named(last));
    expect_all(of_state, 0, layout.every, named(0));
    if (layout.weights_too) expect_all(of_weights, last, 1, named(last));
  }
}

// Each part of the network has two replicas, and the ranks with other parts hear of it too.
TEST(RankTrainer, AFlippedBitOfAPartWithReplicasEndsTheRunOnAllRanks) {
  const Flip of_weights = [](auto& adam) { flip_a_bit(adam.param_groups()[0].params()[0]); };
  TrainOptions options{.model = {.name = "mlp", .width = 0.125}};
  options.check_replicas = 1;
  for (const auto& mesh :
       {lockstep::MeshShape{.data = 2, .pipeline = 2}, lockstep::MeshShape{.data = 2, .tensor = 2}}) {
    options.way = lockstep::SplitNetwork{{.mesh = mesh}};
    EXPECT_THAT(errors_after_flip(4, -1, options, of_weights), testing::Each("(no error)"));
    for (const int odd : {0, 3}) {
      EXPECT_THAT(errors_after_flip(4, odd, options, of_weights), testing::Each(Fails(Error::difference)));
    }
  }
}

TEST(RankTrainer, ComputingGrainsAgainChangesNeitherWeightsNorMetrics) {
  TrainOptions options{.model = {.name = "resnet18", .width = 0.05}, .batch = {.size = 32, .grain = 8}, .epochs = 1};
  options.memory_format = lockstep::MemoryFormat::channels_last;
  const Outcome expected = train(1, options, false);
  options.batch.grain->check_arithmetic = 0.5;
  for (const auto on_nan : {lockstep::OnNan::stop, lockstep::OnNan::skip}) {
    options.on_nan = on_nan;
    const Outcome outcome = train(3, options, false);
    EXPECT_EQ(outcome.history[0].train_loss, expected.history[0].train_loss);
    EXPECT_EQ(outcome.history[0].train_accuracy, expected.history[0].train_accuracy);
    EXPECT_EQ(outcome.history[0].test_accuracy, expected.history[0].test_accuracy);
    for (size_t i = 0; i < expected.weights.size(); ++i) {
      EXPECT_TRUE(torch::equal(outcome.weights[i], expected.weights[i])) << "weight " << i;
    }
  }
}

// Rank 1 alone is asked to stop, after step 10.
TEST(RankTrainer, AllRanksStopAfterTheSameStepAndGoOnWithTheSameBits) {
  const auto data = lockstep::synthetic_images(150, 40);
  TrainOptions options{.model = {.name = "mlp", .width = 0.125},
                       .batch = {.size = 1},
                       .optimizer = {.momentum = 0.9},
                       .rate = {.lr = 0.01}};
  options.keep.checkpoints->every = 10;
  const auto train = [&](const lockstep::RunState* from, bool stops, std::vector<lockstep::RunState>& kept) {
    std::vector<torch::Tensor> weights;
    EpochMetrics metrics;
    lockstep::run(lockstep::test_devices(2), [&](Rank& rank) {
      std::stop_source stop;
      lockstep::TrainCallbacks callbacks;
      callbacks.stop = stop.get_token();
      lockstep::RankTrainer trainer(options, callbacks, task_of(options, data), rank, nullptr, nullptr, from);
      const auto keep = [&] {
        const lockstep::RunState state = trainer.state();
        if (rank.index() == 0) kept.push_back(state);
        if (rank.index() == 1 && stops) stop.request_stop();
      };
      try {
        const EpochMetrics mine = trainer.epoch(1, keep);
        const auto net = trainer.whole();
        if (rank.index() == 0) metrics = mine, weights = net->parameters();
      } catch (const lockstep::Stopped&) {
        EXPECT_TRUE(stops);
      }
    });
    return std::pair(metrics, weights);
  };
  std::vector<lockstep::RunState> kept, ignored;
  const auto whole = train(nullptr, false, ignored);
  train(nullptr, true, kept);
  ASSERT_EQ(kept.size(), 2u);
  EXPECT_GE(kept[1].steps, 11);
  EXPECT_LE(kept[1].steps, 15);  // asked after steps 1, 3, 7 and 15, if not more often
  const auto resumed = train(&kept[1], false, ignored);
  EXPECT_EQ(resumed.first.train_loss, whole.first.train_loss);
  EXPECT_EQ(resumed.first.train_accuracy, whole.first.train_accuracy);
  EXPECT_EQ(resumed.first.test_accuracy, whole.first.test_accuracy);
  ASSERT_EQ(resumed.second.size(), whole.second.size());
  for (size_t i = 0; i < whole.second.size(); ++i) EXPECT_TRUE(torch::equal(resumed.second[i], whole.second[i])) << i;
}

TEST(RankTrainer, RecordsStepsOfRanksWithoutSamplesToo) {
  TrainOptions options;
  options.batch.size = 2;
  options.epochs = 1;
  const Outcome expected = train(3, options, false), outcome = train(3, options, true);
  EXPECT_EQ(outcome.replays, 75 - lockstep::kWarmUpSteps);
  EXPECT_EQ(outcome.history[0].train_loss, expected.history[0].train_loss);
}

// A backend that says it is NCCL, whose exchanges become part of the recording.
struct SaysNccl : lockstep::ObservedBackend {
  using ObservedBackend::ObservedBackend;
  const std::string getBackendName() const override { return "nccl"; }
};

struct Unheeding : lockstep::CallObserver {
  void posts(c10d::OpType, int64_t, int) override {}
  void spent(double) override {}
};

TEST(RankTrainer, ARecordedExchangeNeedsTheFirstDevicesGradients) {
  const auto data = lockstep::synthetic_images(150, 40);
  const auto train_with = [&](const std::string& balance, bool nccl) {
    TrainOptions options;
    options.batch.size = 32;
    options.batch.balance = lockstep::balance_rule_from(balance);
    return lockstep::error_of([&] {
      lockstep::run(lockstep::test_devices(2), [&](Rank& rank) {
        const lockstep::TrainCallbacks callbacks;
        Rank other = rank.wrapped([](const auto& backend) {
          return c10::make_intrusive<SaysNccl>(backend, lockstep::CallObservers{std::make_shared<Unheeding>()});
        });
        lockstep::RankTrainer(options, callbacks, task_of(options, data), nccl ? other : rank, nullptr,
                              std::make_unique<lockstep::FakeGraph>())
            .epoch(1);
      });
    });
  };
  EXPECT_THAT(train_with("0,1", true), Refused());
  EXPECT_THAT(train_with("0.01,1", true), Refused());  // no sample of 32
  EXPECT_EQ(train_with("1,0", true), "(no error)");
  EXPECT_EQ(train_with("0,1", false), "(no error)");
}

TEST(RankTrainer, RanksHaveOneNetworkAfterAnEpochWithItsRunningStatistics) {
  TrainOptions options;
  options.model.name = "resnet18";
  options.model.width = 0.05;
  options.batch.size = 31;  // the ranks' parts differ in size
  options.rate.lr = 0.05;
  options.epochs = 2;
  for (const bool graphed : {false, true}) {
    const auto data = lockstep::synthetic_images(150, 40);
    std::vector<std::vector<torch::Tensor>> states(3);
    lockstep::run(lockstep::test_devices(3), [&](Rank& rank) {
      const lockstep::TrainCallbacks callbacks;
      lockstep::RankTrainer trainer(options, callbacks, task_of(options, data), rank, nullptr,
                                    graphed ? std::make_unique<lockstep::FakeGraph>() : nullptr);
      for (int epoch = 1; epoch <= options.epochs; ++epoch) trainer.epoch(epoch);
      auto& state = states[rank.index()] = trainer.whole()->parameters();
      for (const auto& buffer : trainer.whole()->buffers()) state.push_back(buffer);
    });
    const lockstep::ResNet18 untrained(lockstep::ResNet18Options{.width = 0.05});
    ASSERT_EQ(states[0].size(), untrained->parameters().size() + untrained->buffers().size());
    EXPECT_FALSE(torch::equal(states[0].end()[-3], untrained->buffers().end()[-3]));  // a running mean
    for (size_t i = 0; i < states[0].size(); ++i) {
      EXPECT_TRUE(torch::equal(states[0][i], states[1][i]) && torch::equal(states[0][i], states[2][i])) << i;
    }
  }
}

// ResNet-18's state after an epoch of `images` images, on rank 0.
torch::OrderedDict<std::string, torch::Tensor> resnet_state(int ranks, int64_t images, int64_t batch_size, bool sync) {
  TrainOptions options;
  options.model.name = "resnet18";
  options.model.width = 0.05;
  options.batch.size = batch_size;
  options.rate.lr = 1e-4;  // more, and rounding grows from step to step: how far depends on the CPU's kernels
  options.sync_batchnorm = sync;
  const auto data = lockstep::synthetic_images(images, 10);
  torch::OrderedDict<std::string, torch::Tensor> state;
  lockstep::run(lockstep::test_devices(ranks), [&](Rank& rank) {
    const lockstep::TrainCallbacks callbacks;
    lockstep::RankTrainer trainer(options, callbacks, task_of(options, data), rank, nullptr, nullptr);
    trainer.epoch(1);
    if (rank.index() != 0) return;
    state = trainer.whole()->named_parameters();
    state.update(trainer.whole()->named_buffers());
  });
  return state;
}

double distance(const torch::OrderedDict<std::string, torch::Tensor>& a,
                const torch::OrderedDict<std::string, torch::Tensor>& b) {
  EXPECT_EQ(a.keys(), b.keys());
  double squares = 0;
  for (const auto& item : a) squares += (item.value() - b[item.key()]).square().sum().item<double>();
  return std::sqrt(squares);
}

// float32's rounding grows in few samples' statistics; not as far as other statistics lead.
TEST(RankTrainer, WithSyncBatchNormRanksTrainWhatOneRankTrains) {
  const auto whole = resnet_state(1, 31, 8, false), with_empty_parts = resnet_state(1, 6, 2, false);
  EXPECT_LT(distance(resnet_state(3, 31, 8, true), whole), 0.2 * distance(resnet_state(3, 31, 8, false), whole));
  EXPECT_LT(distance(resnet_state(3, 6, 2, true), with_empty_parts),
            0.05 * distance(resnet_state(3, 6, 2, false), with_empty_parts));
}

}  // namespace rank_trainer_test
