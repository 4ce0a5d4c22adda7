// Labels: concurrency
// What a rank of an elastic job has when another one is gone, at whichever of its calls: whole steps, with which the
// others go on to the weights and the metrics of a run in peace.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/models/weights.hpp>

#include "ranks/observed_backend.hpp"
#include "trainer/elastic.hpp"
#include "trainer/rank_trainer.hpp"
#include "trainer/workload.hpp"

#include <algorithm>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

namespace lockstep {
namespace elastic_steps_test {

class EndsAtCall : public CallObserver {
 public:
  explicit EndsAtCall(int call) : left_(call) {}
  void posts(c10d::OpType, int64_t, int) override {
    if (--left_ == 0) throw std::runtime_error("gone");
  }
  void spent(double) override {}

 private:
  int left_;
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
  options.devices = {torch::kCPU};
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

// What rank 0 of two is left with, if rank 1 is gone at this one of its calls; nothing if it made no more calls.
std::optional<RunState> left_at(int call, const TrainOptions& options, const ImageData& data) {
  const TrainCallbacks callbacks;
  std::optional<RunState> left;
  const auto body = [&](Rank& rank) {
    Rank with_end = rank.wrapped([&](c10::intrusive_ptr<c10d::Backend> backend) -> c10::intrusive_ptr<c10d::Backend> {
      if (rank.index() == 0) return backend;
      return c10::make_intrusive<ObservedBackend>(std::move(backend), std::make_shared<EndsAtCall>(call));
    });
    RankTrainer trainer(options, callbacks, task_of(options, data), with_end, nullptr, nullptr);
    trainer.be_elastic({});
    try {
      trainer.epoch(1);
    } catch (...) {
      if (rank.index() == 0) left = trainer.whole_steps();
      throw;
    }
  };
  try {
    run({torch::kCPU, torch::kCPU}, body);
  } catch (const Error&) {
    if (!left) left.emplace();  // it was gone before the first step
    return left;
  }
  return std::nullopt;
}

TEST(ElasticSteps, AreWholeWheneverARankIsGone) {
  const TrainOptions options = small_options();
  const ImageData data = synthetic_images(24, 8, /*seed=*/1);  // a step of 16 samples and one of 8
  const Outcome expected = in_peace(options, data, nullptr);
  int call = 1;
  int64_t most_steps = 0;
  for (; const auto left = left_at(call, options, data); ++call) {
    const Outcome actual = in_peace(options, data, left->tensors.empty() ? nullptr : &*left);
    EXPECT_EQ(actual.weights, expected.weights) << "call " << call;
    EXPECT_EQ(actual.metrics.train_loss, expected.metrics.train_loss) << "call " << call;
    EXPECT_EQ(actual.metrics.train_accuracy, expected.metrics.train_accuracy) << "call " << call;
    EXPECT_EQ(actual.metrics.test_accuracy, expected.metrics.test_accuracy) << "call " << call;
    most_steps = std::max(most_steps, left->steps);
  }
  EXPECT_GT(call, 10);
  EXPECT_EQ(most_steps, 2);
}

}  // namespace elastic_steps_test
}  // namespace lockstep
