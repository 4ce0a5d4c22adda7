// Labels: concurrency arithmetic 3x3 2x4
// Pipeline: 1 to 4 CPU ranks against one device that holds the whole net, under every schedule.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <lockstep/devices/autocast.hpp>
#include <lockstep/ranks/evaluate.hpp>
#include <lockstep/split/mesh.hpp>

#include "data/parts.hpp"
#include "support/lone_pipeline.hpp"
#include "support/small_nets.hpp"
#include "support/test_devices.hpp"
#include "support/unit_gradient.hpp"

#include <atomic>
#include <chrono>
#include <map>
#include <random>
#include <set>
#include <tuple>

namespace pipeline_test {

using lockstep::Batch;
using lockstep::copy_of;
using lockstep::DataParallel;
using lockstep::LonePipeline;
using lockstep::ModelSplit;
using lockstep::PipelineSchedule;
using lockstep::Rank;
using torch::Tensor;
using torch::nn::Sequential;
namespace F = torch::nn::functional;
namespace nn = torch::nn;

// x + tanh(layer(x)), for a layer that keeps the shape.
struct ResidualImpl : nn::Cloneable<ResidualImpl> {
  explicit ResidualImpl(Sequential layer) : layer_(std::move(layer)) { reset(); }
  void reset() override {
    layer_ = std::dynamic_pointer_cast<nn::SequentialImpl>(layer_->clone());
    register_module("layer", layer_);
  }
  Tensor forward(const Tensor& x) { return x + torch::tanh(layer_->forward(x)); }
  Sequential layer_;
};
TORCH_MODULE(Residual);

std::map<std::string, Tensor> gradients_of(const Sequential& net) {
  std::map<std::string, Tensor> gradients;
  for (const auto& item : net->named_parameters()) gradients[item.key()] = lockstep::on_host(item.value().grad());
  return gradients;
}

// This rank's parameters have the gradients of those of the whole net.
void expect_gradients(const Sequential& mine, const std::map<std::string, Tensor>& all, double tolerance = 1e-12) {
  for (const auto& item : mine->named_parameters()) {
    ASSERT_EQ(all.count(item.key()), 1u) << item.key();
    const Tensor& expected = all.at(item.key());
    ASSERT_TRUE(item.value().grad().defined()) << item.key();
    const double scale = std::max(1.0, expected.abs().max().item<double>());
    EXPECT_LE((item.value().grad().cpu() - expected).abs().max().item<double>(), tolerance * scale) << item.key();
  }
}

Batch on(const lockstep::Rank& rank, const Batch& batch) {
  return {batch.x.to(rank.device()), batch.y.to(rank.device()), batch.global_size};
}

Batch random_batch(int64_t size, std::vector<int64_t> sample, int64_t classes) {
  sample.insert(sample.begin(), size);
  return {torch::randn(sample, torch::kDouble), torch::randint(classes, {size}), size};
}

// ---- Random nets.

class Random {
 public:
  explicit Random(unsigned seed) : engine_(seed) {}
  int64_t pick(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(engine_); }

 private:
  std::mt19937 engine_;
};

void add_activation(Sequential& net, Random& random) {
  switch (random.pick(0, 2)) {
    case 0:
      return net->push_back(nn::Tanh());
    case 1:
      return net->push_back(nn::ReLU());
    default:
      return net->push_back(nn::ReLU(nn::ReLUOptions(/*inplace=*/true)));
  }
}

constexpr int64_t kClasses = 3;

struct Task {
  Sequential net;
  std::vector<int64_t> sample;
};

// Layers that keep the number of features or channels or change it, in residual blocks or not, of doubles.
Task random_task(Random& random, int64_t least_layers) {
  Task task;
  Sequential& net = task.net;
  int64_t width = random.pick(1, 5);
  const bool images = random.pick(0, 1) == 1;
  task.sample = images ? std::vector<int64_t>{width, 4, 5} : std::vector<int64_t>{width};
  const int64_t blocks = random.pick((least_layers + 1) / 2, (least_layers + 1) / 2 + 2);
  for (int64_t i = 0; i < blocks; ++i) {
    const bool residual = random.pick(0, 2) == 0;
    const int64_t next = residual ? width : random.pick(1, 5);
    Sequential layer;
    if (images) {
      layer->push_back(nn::Conv2d(nn::Conv2dOptions(width, next, 3).padding(1)));
    } else {
      layer->push_back(nn::Linear(width, next));
    }
    if (residual) {
      net->push_back(Residual(layer));
    } else {
      net->push_back(*layer->begin());
    }
    add_activation(net, random);
    width = next;
  }
  if (images) net->push_back(nn::Flatten());
  net->push_back(nn::Linear(images ? width * 20 : width, kClasses));
  net->to(torch::kDouble);
  return task;
}

std::vector<int64_t> random_cuts(Random& random, int64_t layers, int stages) {
  std::set<int64_t> cuts;
  while (static_cast<int>(cuts.size()) < stages - 1) cuts.insert(random.pick(1, layers - 1));
  return {cuts.begin(), cuts.end()};
}

// ---- All worlds and schedules; also run as several processes (tests/CMakeLists.txt).

struct Plan {
  std::string name;
  PipelineSchedule schedule;
  int stages_per_rank;
};

class PipelineWorlds : public testing::TestWithParam<std::tuple<int, Plan>> {
 protected:
  PipelineWorlds() { torch::manual_seed(world()); }  // in every process the same
  static int world() { return std::get<0>(GetParam()); }
  static const Plan& plan() { return std::get<1>(GetParam()); }
  static int stages() { return world() * plan().stages_per_rank; }
  static ModelSplit split() {
    return {.schedule = plan().schedule, .stages_per_rank = plan().stages_per_rank, .microbatches = 4};
  }
};
INSTANTIATE_TEST_SUITE_P(Sizes, PipelineWorlds,
                         testing::Combine(testing::Values(1, 2, 3, 4),
                                          testing::Values(Plan{"GPipe", PipelineSchedule::gpipe, 1},
                                                          Plan{"1F1B", PipelineSchedule::one_f_one_b, 1},
                                                          Plan{"Interleaved2", PipelineSchedule::interleaved, 2},
                                                          Plan{"Interleaved3", PipelineSchedule::interleaved, 3})),
                         [](const auto& info) {
                           return std::to_string(std::get<0>(info.param)) + "Ranks" + std::get<1>(info.param).name;
                         });

// Two batches without zero_grad() between, then a third after a step.
TEST_P(PipelineWorlds, RandomNetsHaveTheGradientsOfOneDevice) {
  for (int round = 0; round < 14; ++round) {
    Random random(100 * world() + round);
    const Task task = random_task(random, stages());
    const auto cuts = random_cuts(random, static_cast<int64_t>(task.net->size()), stages());
    const ModelSplit split{.schedule = plan().schedule,
                           .stages_per_rank = plan().stages_per_rank,
                           .microbatches = static_cast<int>(round % 7 + 1),
                           .recompute = random.pick(0, 1) == 1,
                           .cuts = cuts};
    SCOPED_TRACE(testing::Message() << c10::str(*task.net) << "\n" << to_string(split));
    std::vector<Batch> batches;
    for (int i = 0; i < 3; ++i) batches.push_back(random_batch(random.pick(1, 13), task.sample, kClasses));

    Sequential single = copy_of(task.net);
    torch::optim::SGD sgd(single->parameters(), 0.1);
    std::vector<double> losses;
    std::vector<std::map<std::string, Tensor>> gradients;
    for (size_t i = 0; i < batches.size(); ++i) {
      if (i == 2) sgd.step(), sgd.zero_grad();
      const Tensor loss = F::cross_entropy(single->forward(batches[i].x), batches[i].y);
      loss.backward();
      losses.push_back(loss.item<double>());
      gradients.push_back(gradients_of(single));
    }

    lockstep::run(lockstep::test_devices(world()), [&](Rank& rank) {
      LonePipeline pipeline(copy_of(task.net), rank, split);
      torch::optim::SGD sgd(pipeline.module()->parameters(), 0.1);
      for (size_t i = 0; i < batches.size(); ++i) {
        if (i == 2) sgd.step(), sgd.zero_grad();
        EXPECT_NEAR(pipeline.forward_backward(on(rank, batches[i]), F::cross_entropy).item<double>(), losses[i], 1e-12);
        expect_gradients(pipeline.module(), gradients[i]);
      }
      Tensor parameters = torch::tensor(static_cast<int64_t>(pipeline.module()->parameters().size())).to(rank.device());
      rank.allreduce(parameters);
      EXPECT_EQ(parameters.item<int64_t>(), static_cast<int64_t>(single->parameters().size()));
    });
  }
}

TEST_P(PipelineWorlds, ForwardGivesTheNetsOutputOnEveryRank) {
  Random random(world());
  const Task task = random_task(random, stages());
  const Tensor x = random_batch(11, task.sample, kClasses).x;
  const torch::NoGradGuard no_grad;
  const Tensor expected = copy_of(task.net)->forward(x.clone());
  lockstep::run(lockstep::test_devices(world()), [&](Rank& rank) {
    LonePipeline pipeline(copy_of(task.net), rank, split());
    for (const int64_t samples : {11, 3, 0}) {
      const Tensor y = pipeline.forward(x.slice(0, 0, samples).clone().to(rank.device())).cpu();
      EXPECT_TRUE(torch::allclose(y, expected.slice(0, 0, samples), 0, 1e-12)) << samples;
      EXPECT_FALSE(y.requires_grad());
    }
  });
}

TEST_P(PipelineWorlds, AnEmptyBatchChangesNothing) {
  Random random(world());
  const Task task = random_task(random, stages());
  const Batch batch = random_batch(5, task.sample, kClasses);
  lockstep::run(lockstep::test_devices(world()), [&](Rank& rank) {
    LonePipeline pipeline(copy_of(task.net), rank, split());
    const Batch empty = on(rank, {batch.x.slice(0, 0, 0), batch.y.slice(0, 0, 0), 0});
    EXPECT_EQ(pipeline.forward_backward(empty, F::cross_entropy).item<double>(), 0);
    pipeline.forward_backward(on(rank, batch), F::cross_entropy);
    const auto gradients = gradients_of(pipeline.module());
    EXPECT_EQ(pipeline.forward_backward(empty, F::cross_entropy).item<double>(), 0);
    expect_gradients(pipeline.module(), gradients, 0);
  });
}

// ---- What a stage may be.

TEST(PipelineTest, IndicesGoInAndAnyCriterionMayJudge) {
  torch::manual_seed(1);
  Sequential net(nn::Embedding(7, 4), nn::Flatten(), nn::Linear(12, 2));
  net->to(torch::kDouble);
  const Batch batch{torch::randint(7, {6, 3}), torch::randn({6, 2}, torch::kDouble), 6};
  Sequential single = copy_of(net);
  F::mse_loss(single->forward(batch.x), batch.y).backward();
  lockstep::run(lockstep::test_devices(2), [&](Rank& rank) {
    LonePipeline pipeline(copy_of(net), rank, {.microbatches = 4, .cuts = {1}});
    pipeline.forward_backward(on(rank, batch), F::mse_loss);
    expect_gradients(pipeline.module(), gradients_of(single));
    pipeline.module()->zero_grad();
    pipeline.forward_backward(on(rank, batch),
                              [](const Tensor& y_hat, const Tensor& y) { return (y_hat - y).square().mean(); });
    expect_gradients(pipeline.module(), gradients_of(single));
  });
}

// A loss of 16 bits cannot hold the weight of a microbatch.
TEST(PipelineTest, ALowPrecisionLossHasTheGradientsOfAnyOther) {
  struct LayerImpl : nn::Module {
    Tensor w = register_parameter("w", torch::ones({1}, torch::kDouble));
    Tensor forward(const Tensor& x) { return x * w; }
  };
  lockstep::run(lockstep::test_devices(2), [](Rank& rank) {
    LonePipeline pipeline(Sequential(LayerImpl{}, LayerImpl{}), rank, {.microbatches = 3});
    const auto all = lockstep::ones_of(3);
    pipeline.forward_backward({all.x.to(rank.device()), all.y.to(rank.device()), 3},
                              lockstep::mean_in(torch::kBFloat16));
    for (const auto& parameter : pipeline.module()->parameters()) {
      EXPECT_NEAR(parameter.grad().item<double>(), 1, 1e-14);
    }
  });
}

// BatchNorm's running statistics move once per microbatch, with or without computing forward again, and not by the
// zeros that go through at first.
TEST(PipelineTest, BuffersMoveOncePerMicrobatch) {
  torch::manual_seed(1);
  Sequential net(nn::Linear(3, 4), nn::BatchNorm1d(4), nn::Tanh(), nn::BatchNorm1d(4), nn::Linear(4, 2));
  const Batch batch{torch::randn({12, 3}) + 5, torch::randint(2, {12}), 12};
  Sequential single = copy_of(net);
  for (int i = 0; i < 3; ++i) {
    const auto part = lockstep::part_of(12, i, 3);
    (F::cross_entropy(single->forward(batch.x.slice(0, part.begin, part.end)), batch.y.slice(0, part.begin, part.end)) /
     3)
        .backward();
  }
  std::map<std::string, Tensor> buffers;
  for (const auto& item : single->named_buffers()) buffers[item.key()] = item.value();
  for (const bool recompute : {false, true}) {
    for (const auto schedule : {PipelineSchedule::gpipe, PipelineSchedule::one_f_one_b}) {
      lockstep::run(lockstep::test_devices(2), [&](Rank& rank) {
        LonePipeline pipeline(copy_of(net), rank,
                              {.schedule = schedule, .microbatches = 3, .recompute = recompute, .cuts = {2}});
        pipeline.module()[1]->eval();
        pipeline.module()[1]->train();
        pipeline.forward_backward(on(rank, batch), F::cross_entropy);
        EXPECT_TRUE(pipeline.module()->is_training());
        expect_gradients(pipeline.module(), gradients_of(single), 1e-5);
        for (const auto& item : pipeline.module()->named_buffers()) {
          EXPECT_TRUE(torch::allclose(item.value(), buffers.at(item.key()), 1e-5, 1e-6)) << item.key();
        }
      });
    }
  }
}

// A module that was put in eval mode stays there, its neighbours in train mode, though zeros went through all.
TEST(PipelineTest, ModesStayAsTheyWere) {
  lockstep::run(lockstep::test_devices(1), [](Rank& rank) {
    Sequential net(nn::Linear(3, 4), nn::BatchNorm1d(4), nn::Linear(4, 2));
    net[1]->eval();
    LonePipeline pipeline(net, rank);
    pipeline.forward_backward({torch::randn({4, 3}), torch::randint(2, {4}), 4}, F::cross_entropy);
    EXPECT_TRUE(net[0]->is_training());
    EXPECT_FALSE(net[1]->is_training());
    EXPECT_TRUE(net[2]->is_training());
  });
}

// A stage of which nothing is learnt, before and behind others.
TEST(PipelineTest, StagesWithoutParametersPassGradientsOn) {
  torch::manual_seed(1);
  Sequential net(nn::Flatten(), nn::Linear(6, 4), nn::Tanh(), nn::Linear(4, 2));
  net->to(torch::kDouble);
  const Batch batch = random_batch(5, {2, 3}, 2);
  Sequential single = copy_of(net);
  F::cross_entropy(single->forward(batch.x), batch.y).backward();
  lockstep::run(lockstep::test_devices(4), [&](Rank& rank) {
    LonePipeline pipeline(copy_of(net), rank);
    pipeline.forward_backward(on(rank, batch), F::cross_entropy);
    expect_gradients(pipeline.module(), gradients_of(single));
  });
}

// Passes on, and counts how often its backward is called.
struct Counted : torch::autograd::Function<Counted> {
  static inline std::atomic<int> backwards = 0;
  static Tensor forward(torch::autograd::AutogradContext*, const Tensor& x) { return x.clone(); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list gradients) {
    ++backwards;
    return gradients;
  }
};

TEST(PipelineTest, NothingIsComputedForLayersWithoutParameters) {
  const auto layer = [](auto size) { return nn::Linear(nn::LinearOptions(size, size)); };
  const auto count = [](const Tensor& x) { return Tensor(Counted::apply(x)); };
  const Batch batch{torch::randn({4, 3}), torch::zeros({4}, torch::kLong), 4};
  const auto backwards = [&](const Sequential& net) {
    Counted::backwards = 0;
    lockstep::run(lockstep::test_devices(3), [&](Rank& rank) {
      LonePipeline(copy_of(net), rank).forward_backward(on(rank, batch), F::cross_entropy);
    });
    return Counted::backwards.load();
  };
  EXPECT_EQ(backwards(Sequential(nn::Flatten(), nn::Functional(count), layer(3))), 0);
  EXPECT_GT(backwards(Sequential(layer(3), nn::Functional(count), layer(3))), 0);
}

// Also weights that the zeros, or a forward without a graph, have seen in bfloat16 before.
TEST(PipelineTest, MixedPrecisionHasTheGradientsOfOneDevice) {
  torch::manual_seed(1);
  Sequential net(nn::Linear(6, 16), nn::Tanh(), nn::Linear(16, 16), nn::Tanh(), nn::Linear(16, 4));
  const Batch batch{torch::randn({12, 6}), torch::randint(4, {12}), 12};
  Sequential single = copy_of(net);
  {
    const lockstep::Autocast bf16(torch::kCPU);
    F::cross_entropy(single->forward(batch.x), batch.y).backward();
  }
  for (const bool recompute : {false, true}) {
    lockstep::run(lockstep::test_devices(2), [&](Rank& rank) {
      LonePipeline pipeline(
          copy_of(net), rank,
          {.schedule = PipelineSchedule::gpipe, .microbatches = 4, .recompute = recompute, .cuts = {2}});
      const lockstep::Autocast bf16(rank.device());
      pipeline.forward_backward(on(rank, batch), F::cross_entropy);
      expect_gradients(pipeline.module(), gradients_of(single), 0.02);
    });
  }
}

// ---- With other uses of ranks.

TEST(PipelineTest, EvaluateCountsAsOnOneDevice) {
  torch::manual_seed(1);
  Sequential net(nn::Linear(3, 8), nn::Tanh(), nn::Linear(8, 4));
  const lockstep::Dataset data{torch::randn({37, 3}), torch::randint(4, {37})};
  lockstep::Score expected;
  const auto evaluate = [&](const auto& forward, Rank& rank) { return lockstep::evaluate(forward, data, rank, 10); };
  lockstep::run(lockstep::test_devices(1), [&](Rank& rank) {
    expected = evaluate([&](const Tensor& x) { return copy_of(net)->forward(x); }, rank);
  });
  lockstep::run(lockstep::test_devices(2), [&](Rank& rank) {
    Rank alone = rank.group(rank.index());
    LonePipeline pipeline(copy_of(net), rank);
    const auto score = evaluate([&](const Tensor& x) { return pipeline.forward(x); }, alone);
    EXPECT_EQ(score.correct, expected.correct);
    EXPECT_NEAR(score.loss, expected.loss, 1e-5);
  });
}

// Two pipelines of two ranks, whose replicas' gradients are averaged: buckets of one parameter each, so that one that
// goes too early would show.
TEST(PipelineTest, ReplicasOverADataAxisHaveTheGradientsOfTheGlobalBatch) {
  torch::manual_seed(1);
  Random random(1);
  for (const auto& [schedule, stages_per_rank] :
       {std::pair(PipelineSchedule::gpipe, 1), std::pair(PipelineSchedule::one_f_one_b, 1),
        std::pair(PipelineSchedule::interleaved, 2), std::pair(PipelineSchedule::interleaved, 3)}) {
    const ModelSplit split{.mesh = {.data = 2, .pipeline = 2},
                           .schedule = schedule,
                           .stages_per_rank = stages_per_rank,
                           .microbatches = 3};
    for (const int64_t size : {9, 5, 1}) {  // the second pipeline gets nothing of one sample
      const Task task = random_task(random, 6);
      const Batch whole = random_batch(size, task.sample, kClasses);
      Sequential single = copy_of(task.net);
      std::vector<std::map<std::string, Tensor>> gradients;
      for (int i = 0; i < 2; ++i) {
        F::cross_entropy(single->forward(whole.x), whole.y).backward();
        gradients.push_back(gradients_of(single));
      }
      lockstep::run(lockstep::test_devices(4), [&](Rank& rank) {
        lockstep::Mesh mesh(rank, split.mesh);
        lockstep::Pipeline pipeline(split_into_stages(copy_of(task.net), split), mesh.pipeline(), split);
        DataParallel replicas(torch::nn::Sequential(pipeline.module()), mesh.data(),
                              {.bucket_bytes = 1, .first_bucket_bytes = 1});
        const auto part = lockstep::part_of(size, mesh.data().index(), 2);
        const Batch mine{whole.x.slice(0, part.begin, part.end).clone(), whole.y.slice(0, part.begin, part.end), size};
        for (int i = 0; i < 2; ++i) {
          pipeline.forward_backward(mine, F::cross_entropy, replicas.replica());
          expect_gradients(pipeline.module(), gradients[i]);
        }
      });
    }
  }
}

}  // namespace pipeline_test
