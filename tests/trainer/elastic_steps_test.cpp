// Labels: concurrency long
// What a rank of an elastic job has when another one is gone, at whichever of its calls, or when another one's memory
// has changed: whole steps, with which the others go on to the weights and the metrics of a run in peace.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/devices/devices.hpp>
#include <lockstep/lab/optimizers.hpp>
#include <lockstep/nn/tensor_files.hpp>
#include <lockstep/nn/weights.hpp>

#include "data_parallel/replica_check.hpp"
#include "devices/gpu_math.hpp"
#include "ranks/observed_backend.hpp"
#include "ranks/rank_wait.hpp"
#include "support/test_devices.hpp"
#include "support/time_limits.hpp"
#include "trainer/elastic.hpp"
#include "trainer/rank_trainer.hpp"
#include "trainer/train_options.hpp"
#include "trainer/workload.hpp"

#include <algorithm>
#include <memory>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace lockstep {
namespace elastic_steps_test {

// Sanitizers look at memory and threads: there every third call is enough.
constexpr int kStride = kSlowdown;

// A process that is gone has no memory. This rank's thread frees its own, so on a GPU the thread first waits for all
// that is posted.
class EndsAtCall : public CallObserver {
 public:
  EndsAtCall(int call, Rank& rank) : left_(call), rank_(rank) {}
  void posts(c10d::OpType, int64_t, int) override {
    if (--left_ != 0) return;
    synchronize_users(rank_);
    throw std::runtime_error("gone");
  }
  void spent(double) override {}

 private:
  int left_;
  Rank& rank_;
};

TrainOptions small_options() {
  TrainOptions options;
  options.model = {.name = "resnet18", .width = 0.05};  // with running statistics
  options.memory_format = MemoryFormat::contiguous;
  options.batch.size = 16;
  options.batch.grain = 4;
  options.optimizer.momentum = 0.9;
  options.rate.lr = 0.02;
  options.epochs = 1;
  options.devices = test_devices(1);
  return options;
}

struct Outcome {
  std::string weights;
  EpochMetrics metrics;
};

// Trains the epoch from where `state` is.
Outcome in_peace(const TrainOptions& options, const ImageData& data, const RunState* state) {
  const TrainCallbacks callbacks;
  Outcome outcome;
  run(options.devices, [&](Rank& rank) {
    RankTrainer trainer(options, callbacks, task_of(options, data), rank, nullptr, nullptr, state);
    outcome.metrics = trainer.epoch(1);
    outcome.weights = weights_hash(*trainer.whole());
  });
  return outcome;
}

// States that ranks are left with, if number `gone` is gone at this one of its calls; nothing if it made no more calls.
using States = std::vector<std::optional<RunState>>;
std::optional<States> left_at(int call, const TrainOptions& options, const ImageData& data, int gone = 1,
                              int ranks = 3) {
  const TrainCallbacks callbacks;
  States left(static_cast<size_t>(ranks));
  const auto body = [&](Rank& rank) {
    Rank with_end = rank.index() == gone ? observed(rank, {std::make_shared<EndsAtCall>(call, rank)}) : rank;
    RankTrainer trainer(options, callbacks, task_of(options, data), with_end, nullptr, nullptr);
    trainer.be_elastic({});
    try {
      trainer.epoch(1);
    } catch (...) {
      left[static_cast<size_t>(rank.index())] = trainer.whole_steps();
      throw;
    }
  };
  try {
    run(test_devices(left.size()), body);
  } catch (const Error&) {
    return left;
  }
  return std::nullopt;
}

struct Found {
  bool flipped = false, found = false;
  std::vector<int> ranks;  // ranks that are said to differ
  RunState left;           // to rank 0
};

// Gives what ranks find if a bit of a weight flips in rank 1's memory while it computes the gradient of that number,
// from 1. In a grain only the gradients of the last and of the first parameter are counted.
Found flipped_at(int gradient, int ranks, const TrainOptions& options, const ImageData& data) {
  const TrainCallbacks callbacks;
  Found found;
  run(Devices(static_cast<size_t>(ranks), torch::kCPU), [&](Rank& rank) {
    RankTrainer trainer(options, callbacks, task_of(options, data), rank, nullptr, nullptr);
    trainer.be_elastic({});
    const auto parameters = trainer.whole()->parameters();
    int left = gradient;
    for (const auto& parameter : {parameters.front(), parameters.back()}) {
      if (rank.index() != 1) continue;
      parameter.register_hook([&](const at::Tensor&) {
        if (--left == 0) *static_cast<int32_t*>(parameters.front().mutable_data_ptr()) ^= 1 << 22;
      });
    }
    try {
      trainer.epoch(1);
    } catch (const ReplicasDiffer& difference) {
      if (rank.index() == 0) found.found = true, found.ranks = difference.ranks(), found.left = trainer.whole_steps();
    }
    if (rank.index() == 1) found.flipped = left <= 0;
  });
  return found;
}

TEST(ElasticSteps, AreWholeWhereverAReplicaChanges) {
  TrainOptions options = small_options();
  const ImageData data = synthetic_images(24, 8, /*seed=*/1);
  const Outcome expected = in_peace(options, data, nullptr);
  options.check_replicas = 1;
  int in_second_step = 0, gradient = 1;
  for (Found found; (found = flipped_at(gradient, 3, options, data)).flipped; ++gradient) {
    EXPECT_TRUE(found.found) << "gradient " << gradient;
    EXPECT_THAT(found.ranks, testing::ElementsAre(1)) << "gradient " << gradient;
    const Outcome actual = in_peace(options, data, &found.left);
    EXPECT_EQ(actual.weights, expected.weights) << "gradient " << gradient;
    EXPECT_EQ(actual.metrics.train_loss, expected.metrics.train_loss) << "gradient " << gradient;
    if (found.left.steps == 1) ++in_second_step;
  }
  EXPECT_GE(gradient, 5);
  EXPECT_EQ(in_second_step, 2);  // gradients of the step's one grain
}

// Two ranks have no majority. But a rank knows what it held after the update before, and so what has changed since.
TEST(ElasticSteps, OfTwoRanksTheOneWhoseMemoryHasChangedIsNamed) {
  TrainOptions options = small_options();
  options.check_replicas = 1;
  const ImageData data = synthetic_images(24, 8, /*seed=*/1);
  for (const auto& [gradient, is_known] : {std::pair(1, false), std::pair(5, true)}) {  // the first step has 1 to 4
    const Found found = flipped_at(gradient, 2, options, data);
    EXPECT_TRUE(found.found);
    EXPECT_EQ(found.left.steps, is_known ? 1 : 0);
    EXPECT_EQ(found.ranks, is_known ? std::vector{1} : std::vector<int>());
  }
}

TEST(ElasticSteps, AreWholeWheneverARankIsGone) {
  const GpuMath math({.reproducible = true});
  const TrainOptions options = small_options();
  const ImageData data = synthetic_images(24, 8, /*seed=*/1);  // a step of 16 samples and one of 8
  const Outcome expected = in_peace(options, data, nullptr);
  int call = 1;
  int64_t most_steps = 0;
  for (; const auto states = left_at(call, options, data, /*gone=*/1, /*ranks=*/2); call += kStride) {
    const auto& left = (*states)[0];
    const Outcome actual = in_peace(options, data, left ? &*left : nullptr);
    EXPECT_EQ(actual.weights, expected.weights) << "call " << call;
    EXPECT_EQ(actual.metrics.train_loss, expected.metrics.train_loss) << "call " << call;
    EXPECT_EQ(actual.metrics.train_accuracy, expected.metrics.train_accuracy) << "call " << call;
    EXPECT_EQ(actual.metrics.lr, expected.metrics.lr) << "call " << call;
    EXPECT_EQ(actual.metrics.test_accuracy, expected.metrics.test_accuracy) << "call " << call;
    if (left) most_steps = std::max(most_steps, left->steps);
  }
  EXPECT_GE(call, 10);
  EXPECT_EQ(most_steps, 2);
}

// Trains the epoch from where the ranks are that are left.
Outcome together(const TrainOptions& options, const ImageData& data, const States& left) {
  const TrainCallbacks callbacks;
  Outcome outcome;
  run(test_devices(left.size()), [&](Rank& rank) {
    std::optional<RunState> state = left[static_cast<size_t>(rank.index())];
    hand_over(state, rank);
    RankTrainer trainer(options, callbacks, task_of(options, data), rank, nullptr, nullptr, state ? &*state : nullptr);
    trainer.be_elastic({});
    const EpochMetrics metrics = trainer.epoch(1);
    if (rank.index() == 0) outcome = {weights_hash(*trainer.whole()), metrics};
  });
  return outcome;
}

// Two of three ranks compute the step again together, also with one more that joins.
TEST(ElasticSteps, AreComputedAgainByThoseThatAreLeft) {
  const GpuMath math({.reproducible = true});
  TrainOptions in_parts = small_options();
  in_parts.batch.accumulate = 2;
  in_parts.on_nan = OnNan::skip;
  const ImageData data = synthetic_images(24, 8, /*seed=*/1);
  const auto expect_same = [&](const TrainOptions& options, int gone, int stride) {
    const Outcome expected = in_peace(options, data, nullptr);
    std::set<int64_t> steps;
    for (int call = 1; const auto left = left_at(call, options, data, gone); call += std::max(stride, kStride)) {
      const auto &first = (*left)[gone == 0 ? 1 : 0], &second = (*left)[gone == 2 ? 1 : 2];
      const States others = {first, second}, with_one_that_joins = {std::nullopt, second, first};
      const Outcome actual = together(options, data, call % 2 == 0 ? others : with_one_that_joins);
      const auto which = testing::Message() << "rank " << gone << ", call " << call;
      EXPECT_EQ(actual.weights, expected.weights) << which;
      EXPECT_EQ(actual.metrics.train_loss, expected.metrics.train_loss) << which;
      EXPECT_EQ(actual.metrics.train_accuracy, expected.metrics.train_accuracy) << which;
      EXPECT_EQ(actual.metrics.test_accuracy, expected.metrics.test_accuracy) << which;
      if (first) steps.insert(first->steps);
    }
    EXPECT_GE(steps.size(), 2u);
  };
  expect_same(small_options(), /*gone=*/1, /*stride=*/3);
  expect_same(in_parts, /*gone=*/0, /*stride=*/5);
}

// One bit of rank 1's momentum flips between two steps. The rank is known, and the two others have the whole state.
TEST(ElasticSteps, AreWholeWhereAReplicasMomentumChanges) {
  TrainOptions options = small_options();
  const ImageData data = synthetic_images(24, 8, /*seed=*/1);
  const Outcome expected = in_peace(options, data, nullptr);
  options.check_replicas = options.keep.checkpoints->every = 1;
  const TrainCallbacks callbacks;
  States left(3);
  run(Devices(3, torch::kCPU), [&](Rank& rank) {
    torch::optim::Optimizer* made = nullptr;
    Task task = task_of(options, data);
    task.optimizer = [&](const Task::Groups& groups) {
      auto sgd = make_optimizer(options.optimizer.kind, groups, optimizer_settings(options));
      made = sgd.get();
      return sgd;
    };
    RankTrainer trainer(options, callbacks, task, rank, nullptr, nullptr);
    trainer.be_elastic({});
    const auto flip = [&] {
      auto& state = static_cast<torch::optim::SGDParamState&>(*made->state().begin()->second);
      if (rank.index() == 1) *static_cast<int32_t*>(state.momentum_buffer().mutable_data_ptr()) ^= 1 << 22;
    };
    try {
      trainer.epoch(1, flip);
    } catch (const ReplicasDiffer& difference) {
      EXPECT_THAT(difference.ranks(), testing::ElementsAre(1));
      left[static_cast<size_t>(rank.index())] = trainer.whole_steps();
    }
  });
  ASSERT_TRUE(left[0] && left[2]);
  EXPECT_EQ(left[0]->steps, 1);
  left[1] = std::nullopt;
  const Outcome actual = together(options, data, left);
  EXPECT_EQ(actual.weights, expected.weights);
  EXPECT_EQ(actual.metrics.train_loss, expected.metrics.train_loss);
}

}  // namespace elastic_steps_test
}  // namespace lockstep
