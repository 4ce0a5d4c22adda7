// Labels: concurrency arithmetic long 3x3 2x4
// DataParallel: replicas over 1 to 5 CPU ranks against one module that sees the whole batch, with gradients in many
// buckets, in one, and averaged after backward.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/base/error.hpp>
#include <lockstep/data_parallel/data_parallel.hpp>

#include "data/parts.hpp"
#include "support/error_of.hpp"
#include "support/test_devices.hpp"

#include <functional>
#include <map>
#include <optional>
#include <random>
#include <tuple>

namespace data_parallel_test {

using lockstep::Batch;
using lockstep::DataParallel;
using lockstep::DataParallelOptions;
using lockstep::Rank;
using torch::Tensor;
namespace F = torch::nn::functional;

// Two layers that share one weight.
struct SharedMlp : torch::nn::Module {
  SharedMlp() {
    first = register_module("first", torch::nn::Linear(6, 6));
    last = register_module("last", torch::nn::Linear(6, 3));
  }
  Tensor forward(const Tensor& x) { return last(torch::tanh(first(torch::tanh(first(x))))); }
  torch::nn::Linear first{nullptr}, last{nullptr};
};

// A branch that no forward uses, and a frozen weight.
struct UnusedBranch : torch::nn::Module {
  UnusedBranch() {
    used = register_module("used", torch::nn::Linear(6, 3));
    unused = register_module("unused", torch::nn::Linear(4, 4));
    scale = register_parameter("scale", torch::full({1}, 2.0), /*requires_grad=*/false);
  }
  Tensor forward(const Tensor& x) { return used(x) * scale; }
  torch::nn::Linear used{nullptr}, unused{nullptr};
  Tensor scale;
};

// Uses one of its branches, by the sign of the input's sum: on different ranks different ones.
struct Branches : torch::nn::Module {
  Branches() {
    negative = register_module("negative", torch::nn::Linear(6, 3));
    positive = register_module("positive", torch::nn::Linear(6, 3));
  }
  Tensor forward(const Tensor& x) { return x.sum().item<double>() > 0 ? positive(x) : negative(x); }
  torch::nn::Linear negative{nullptr}, positive{nullptr};
};

torch::nn::Sequential convolutions() {
  return torch::nn::Sequential(torch::nn::Conv2d(1, 6, 5), torch::nn::ReLU(), torch::nn::AvgPool2d(2),
                               torch::nn::Conv2d(6, 12, 5), torch::nn::ReLU(), torch::nn::AvgPool2d(2),
                               torch::nn::Flatten(), torch::nn::Linear(12 * 4 * 4, 32), torch::nn::ReLU(),
                               torch::nn::Linear(32, 10));
}

Batch whole_batch(int64_t size, c10::IntArrayRef sample_shape, int64_t classes, torch::Dtype type) {
  auto shape = sample_shape.vec();
  shape.insert(shape.begin(), size);
  return {torch::randn(shape, type), torch::randint(classes, {size}), size};
}

Batch part_of_batch(const Batch& whole, const Rank& rank) {
  const auto part = lockstep::part_of(whole.global_size, rank.index(), rank.world_size());
  return {whole.x.slice(0, part.begin, part.end).to(rank.device()),
          whole.y.slice(0, part.begin, part.end).to(rank.device()), whole.global_size};
}

std::map<std::string, Tensor> copy_of(const torch::OrderedDict<std::string, Tensor>& tensors, bool gradients) {
  std::map<std::string, Tensor> copies;
  for (const auto& item : tensors) {
    const Tensor& tensor = gradients ? item.value().grad() : item.value();
    copies[item.key()] = tensor.defined() ? lockstep::on_host(tensor) : Tensor();
  }
  return copies;
}

void expect_near(const std::map<std::string, Tensor>& actual, const std::map<std::string, Tensor>& expected,
                 double tolerance) {
  ASSERT_EQ(actual.size(), expected.size());
  for (const auto& [name, value] : expected) {
    const Tensor& mine = actual.at(name);
    if (!value.defined()) {
      EXPECT_FALSE(mine.defined()) << name;
      continue;
    }
    ASSERT_TRUE(mine.defined()) << name;
    const double scale = std::max(1.0, value.abs().max().item<double>());
    EXPECT_LE((mine - value).abs().max().item<double>(), tolerance * scale) << name;
  }
}

// Trains `make()`'s module for a few steps on one device and on `world` ranks, and compares gradients after each step
// and weights at the end.
template <class Make>
void expect_equal_training(Make make, c10::IntArrayRef sample_shape, int64_t classes, int world,
                           const DataParallelOptions& options, int64_t batch_size, torch::Dtype type,
                           double tolerance) {
  SCOPED_TRACE("world " + std::to_string(world) + ", batch " + std::to_string(batch_size));
  torch::manual_seed(batch_size);  // in every process the same
  auto single = make();
  single->to(type);
  const auto start = copy_of(single->named_parameters(), false);
  std::vector<Batch> steps;
  for (int i = 0; i < 3; ++i) steps.push_back(whole_batch(batch_size, sample_shape, classes, type));

  torch::optim::SGD optimizer(single->parameters(), 0.1);
  std::vector<std::map<std::string, Tensor>> gradients;
  std::vector<double> losses;
  for (const auto& step : steps) {
    optimizer.zero_grad();
    const Tensor loss = F::cross_entropy(single->forward(step.x), step.y);
    loss.backward();
    gradients.push_back(copy_of(single->named_parameters(), true));
    losses.push_back(loss.template item<double>());
    optimizer.step();
  }
  const auto weights = copy_of(single->named_parameters(), false);

  lockstep::run(lockstep::test_devices(world), [&](Rank& rank) {
    auto module = make();
    module->to(type);
    {
      const torch::NoGradGuard no_grad;
      for (auto& item : module->named_parameters())
        item.value().copy_(start.at(item.key()) * (1 + rank.index()));  // only rank 0's are right
    }
    DataParallel net(module, rank, options);
    torch::optim::SGD sgd(net->parameters(), 0.1);
    for (size_t i = 0; i < steps.size(); ++i) {
      sgd.zero_grad(/*set_to_none=*/i % 2 == 0);
      const Batch batch = part_of_batch(steps[i], rank);
      auto loss = net.loss(batch, F::cross_entropy);
      loss.backward();
      expect_near(copy_of(net->named_parameters(), true), gradients[i], tolerance);
      const Tensor sum = torch::full({}, loss.item() * static_cast<double>(batch.size()),
                                     torch::dtype(torch::kDouble).device(rank.device()));
      rank.allreduce(sum);
      EXPECT_NEAR(sum.item<double>() / static_cast<double>(batch_size), losses[i], tolerance * 10);
      sgd.step();
    }
    expect_near(copy_of(net->named_parameters(), false), weights, tolerance);
  });
}

struct Buckets {
  std::string name;
  DataParallelOptions options;
};
const Buckets many{"Many", {.bucket_bytes = 64, .first_bucket_bytes = 1}};
const Buckets one{"One", {.bucket_bytes = 1 << 30, .first_bucket_bytes = 1 << 30}};
const Buckets afterwards{"Afterwards", {.bucket_bytes = 1000, .overlap = false}};

class DataParallelWorlds : public testing::TestWithParam<std::tuple<int, Buckets>> {
 protected:
  DataParallelWorlds() { torch::manual_seed(world()); }  // in every process the same
  static int world() { return std::get<0>(GetParam()); }
  static const DataParallelOptions& options() { return std::get<1>(GetParam()).options; }
};
INSTANTIATE_TEST_SUITE_P(Sizes, DataParallelWorlds,
                         testing::Combine(testing::Values(1, 2, 3, 4, 5), testing::Values(many, one, afterwards)),
                         [](const auto& info) {
                           return std::to_string(std::get<0>(info.param)) + "Ranks" + std::get<1>(info.param).name;
                         });

TEST_P(DataParallelWorlds, ConvolutionsTrainAsOnOneDevice) {
  const auto make = [] { return convolutions().ptr(); };
  for (const int64_t batch : {8, 7, 3, 1}) {
    expect_equal_training(make, {1, 28, 28}, 10, world(), options(), batch, torch::kDouble, 1e-12);
  }
  expect_equal_training(make, {1, 28, 28}, 10, world(), options(), 13, torch::kFloat, 1e-5);
}

TEST_P(DataParallelWorlds, ModulesOfAllKindsTrainAsOnOneDevice) {
  std::mt19937 random(world());
  for (int round = 0; round < 10; ++round) {
    const auto batch = std::uniform_int_distribution<int64_t>(1, 20)(random);
    expect_equal_training([] { return std::make_shared<SharedMlp>(); }, {6}, 3, world(), options(), batch,
                          torch::kDouble, 1e-12);
    expect_equal_training([] { return std::make_shared<UnusedBranch>(); }, {6}, 3, world(), options(), batch,
                          torch::kDouble, 1e-12);
    expect_equal_training([] { return std::make_shared<UnusedBranch>(); }, {6}, 3, world(), options(), batch,
                          torch::kFloat, 1e-5);
  }
}

TEST_P(DataParallelWorlds, RandomLayersTrainAsOnOneDevice) {
  for (int round = 0; round < 10; ++round) {
    std::mt19937 random(100 * world() + round);
    const auto pick = [&](int64_t low, int64_t high) {
      return std::uniform_int_distribution<int64_t>(low, high)(random);
    };
    const int64_t inputs = pick(1, 9), classes = pick(2, 6), layers = pick(0, 3), hidden = pick(1, 12);
    const auto make = [&] {
      auto net = std::make_shared<torch::nn::SequentialImpl>();
      int64_t width = inputs;
      for (int64_t i = 0; i < layers; ++i, width = hidden) {
        net->push_back(torch::nn::Linear(width, hidden));
        net->push_back(torch::nn::Tanh());
      }
      net->push_back(torch::nn::Linear(width, classes));
      return net;
    };
    expect_equal_training(make, {inputs}, classes, world(), options(), pick(1, 30), torch::kDouble, 1e-12);
  }
}

TEST_P(DataParallelWorlds, ParametersAndBuffersStartAsRankZeros) {
  lockstep::run(lockstep::test_devices(world()), [](Rank& rank) {
    auto module = std::make_shared<torch::nn::SequentialImpl>(torch::nn::Linear(3, 4), torch::nn::BatchNorm1d(4));
    {
      const torch::NoGradGuard no_grad;
      for (auto& tensor : module->parameters()) tensor.fill_(rank.index() + 1);
      for (auto& tensor : module->buffers()) tensor.fill_(rank.index() + 7);
    }
    DataParallel net(module, rank);
    for (auto& tensor : net->parameters()) EXPECT_TRUE(tensor.eq(1).all().item<bool>());
    for (auto& tensor : net->buffers()) EXPECT_TRUE(tensor.eq(7).all().item<bool>());
  });
}

TEST_P(DataParallelWorlds, BranchesThatOnlySomeRanksUseAreAveraged) {
  const int world = DataParallelWorlds::world();
  Branches single;
  const Tensor inputs = torch::randn({world, 6}), targets = torch::arange(world) % 3;
  Tensor loss = torch::zeros({});
  for (int i = 0; i < world; ++i)
    loss = loss + F::cross_entropy(single.forward(inputs.narrow(0, i, 1)), targets.narrow(0, i, 1)) / world;
  loss.backward();
  const auto expected = copy_of(single.named_parameters(), true);
  lockstep::run(lockstep::test_devices(world), [&](Rank& rank) {
    DataParallel net(Branches(), rank, options());
    {
      const torch::NoGradGuard no_grad;
      for (auto& item : net->named_parameters()) item.value().copy_(single.named_parameters()[item.key()]);
    }
    net.loss(part_of_batch({inputs, targets, world}, rank), F::cross_entropy).backward();
    expect_near(copy_of(net->named_parameters(), true), expected, 1e-6);
  });
}

// A net whose ways are used in turn, and one of them never: momentum and weight decay move no parameter that had no
// gradient in a step.
struct Ways : torch::nn::Module {
  Ways() {
    for (int i = 0; i < 3; ++i) {
      ways.push_back(register_module("way" + std::to_string(i), torch::nn::Linear(6, 3)));
    }
    to(torch::kDouble);
  }
  Tensor forward(const Tensor& x) { return ways[way](x); }
  std::vector<torch::nn::Linear> ways;
  size_t way = 0;
};

TEST_P(DataParallelWorlds, UnusedParametersStayAsTheyAreAsOnOneDevice) {
  using Optimizer = std::unique_ptr<torch::optim::Optimizer>;
  const std::vector<std::function<Optimizer(const std::vector<Tensor>&)>> recipes = {
      [](const auto& parameters) -> Optimizer {
        const auto options = torch::optim::AdamWOptions(0.05).weight_decay(0.1);
        return std::make_unique<torch::optim::AdamW>(parameters, options);
      },
      [](const auto& parameters) -> Optimizer {
        const auto options = torch::optim::SGDOptions(0.1).momentum(0.9).weight_decay(0.01);
        return std::make_unique<torch::optim::SGD>(parameters, options);
      }};
  const auto start = std::make_shared<Ways>();
  std::vector<Batch> batches;
  for (const int64_t size : {5, 2, 1, 7, 4, 3, 6, 2}) batches.push_back(whole_batch(size, {6}, 3, torch::kDouble));
  for (const auto& recipe : recipes) {
    const auto train = [&](Ways& net, const std::function<void(const Batch&)>& backward) {
      const auto optimizer = recipe(net.parameters());
      for (size_t step = 0; step < batches.size(); ++step) {
        net.way = step / 2 % 2;
        optimizer->zero_grad();
        backward(batches[step]);
        EXPECT_FALSE(net.ways[2]->weight.grad().defined());
        EXPECT_FALSE(net.ways[1 - net.way]->bias.grad().defined());
        optimizer->step();
      }
    };
    const auto copy_start = [&](Ways& net) {
      const torch::NoGradGuard no_grad;
      for (auto& item : net.named_parameters()) item.value().copy_(start->named_parameters()[item.key()]);
    };
    Ways single;
    copy_start(single);
    train(single, [&](const Batch& batch) { F::cross_entropy(single.forward(batch.x), batch.y).backward(); });
    lockstep::run(lockstep::test_devices(world()), [&](Rank& rank) {
      DataParallel net(Ways(), rank, options());
      copy_start(*net);
      train(*net, [&](const Batch& batch) { net.loss(part_of_batch(batch, rank), F::cross_entropy).backward(); });
      expect_near(copy_of(net->named_parameters(), false), copy_of(single.named_parameters(), false), 1e-12);
    });
  }
}

TEST_P(DataParallelWorlds, NoSyncAccumulatesAndLaterCallsAddUp) {
  const int world = DataParallelWorlds::world();
  std::vector<Batch> batches;
  for (const int64_t size : {5, 2, 9, 4}) batches.push_back(whole_batch(size, {6}, 3, torch::kDouble));
  const auto make = [] {
    auto module = std::make_shared<SharedMlp>();
    module->to(torch::kDouble);
    return module;
  };
  const auto single = make();
  for (const auto& batch : batches) F::cross_entropy(single->forward(batch.x), batch.y).backward();
  const auto expected = copy_of(single->named_parameters(), true);

  lockstep::run(lockstep::test_devices(world), [&](Rank& rank) {
    DataParallel net(make(), rank, options());
    {
      const torch::NoGradGuard no_grad;
      for (auto& item : net->named_parameters()) item.value().copy_(single->named_parameters()[item.key()]);
    }
    {
      const auto guard = net.no_sync();
      net.loss(part_of_batch(batches[0], rank), F::cross_entropy).backward();
      if (rank.index() == 0) {
        EXPECT_TRUE(net->last->weight.grad().defined());  // local gradients are there, not averaged
      }
      net.loss(part_of_batch(batches[1], rank), F::cross_entropy).backward();
    }
    net.loss(part_of_batch(batches[2], rank), F::cross_entropy).backward();
    net.loss(part_of_batch(batches[3], rank), F::cross_entropy).backward();  // again, without zero_grad
    expect_near(copy_of(net->named_parameters(), true), expected, 1e-12);
  });
}

// Several backward calls before a step, each averaged, then the gradients' global norm clipped.
TEST_P(DataParallelWorlds, ClippingAndSeveralBackwardCallsPerStepTrainAsOnOneDevice) {
  const auto make = [] {
    auto module = std::make_shared<SharedMlp>();
    module->to(torch::kDouble);
    return module;
  };
  std::vector<Batch> batches;
  for (const int64_t size : {5, 1, 9, 4, 3, 7}) batches.push_back(whole_batch(size, {6}, 3, torch::kDouble));
  const double max_norm = 0.1;  // well below the gradients' norm
  const auto train = [&](SharedMlp& module, const std::function<void(const Batch&)>& backward) {
    torch::optim::SGD sgd(module.parameters(), 0.5);
    for (size_t i = 0; i < batches.size(); i += 2) {
      sgd.zero_grad(/*set_to_none=*/i == 0);
      backward(batches[i]);
      backward(batches[i + 1]);
      EXPECT_GT(torch::nn::utils::clip_grad_norm_(module.parameters(), max_norm), max_norm);
      sgd.step();
    }
  };
  const auto single = make();
  const auto start = copy_of(single->named_parameters(), false);
  train(*single, [&](const Batch& batch) { F::cross_entropy(single->forward(batch.x), batch.y).backward(); });
  const auto expected = copy_of(single->named_parameters(), false);

  lockstep::run(lockstep::test_devices(world()), [&](Rank& rank) {
    DataParallel net(make(), rank, options());
    {
      const torch::NoGradGuard no_grad;
      for (auto& item : net->named_parameters()) item.value().copy_(start.at(item.key()));
    }
    train(*net, [&](const Batch& batch) { net.loss(part_of_batch(batch, rank), F::cross_entropy).backward(); });
    expect_near(copy_of(net->named_parameters(), false), expected, 1e-12);
  });
}

// k minibatches per step, with gradients that are undefined, zeroed, or left from before.
TEST_P(DataParallelWorlds, AccumulationOverMinibatchesTrainsAsOnOneDevice) {
  std::vector<Batch> batches;
  for (const int64_t size : {5, 2, 9, 4, 3, 1, 8, 6, 2}) batches.push_back(whole_batch(size, {6}, 3, torch::kDouble));
  const auto make = [] {
    auto module = std::make_shared<UnusedBranch>();
    module->to(torch::kDouble);
    return module;
  };
  const auto single = make();
  const auto start = copy_of(single->named_parameters(), false);
  const auto train = [&](UnusedBranch& module, const std::function<void(const Batch&, bool last)>& backward) {
    torch::optim::SGD sgd(module.parameters(), 0.1);
    for (size_t i = 0; i < batches.size(); ++i) {
      const bool last = i % 3 == 2;
      backward(batches[i], last);
      if (!last) continue;
      sgd.step();
      if (i > 3) sgd.zero_grad(/*set_to_none=*/i % 2 == 0);
    }
  };
  train(*single, [&](const Batch& batch, bool) { F::cross_entropy(single->forward(batch.x), batch.y).backward(); });
  const auto expected = copy_of(single->named_parameters(), false);

  lockstep::run(lockstep::test_devices(world()), [&](Rank& rank) {
    DataParallel net(make(), rank, options());
    {
      const torch::NoGradGuard no_grad;
      for (auto& item : net->named_parameters()) item.value().copy_(start.at(item.key()));
    }
    train(*net, [&](const Batch& batch, bool last) {
      auto loss = net.loss(part_of_batch(batch, rank), F::cross_entropy);
      if (last) return loss.backward();
      const auto guard = net.no_sync();
      loss.backward();
    });
    expect_near(copy_of(net->named_parameters(), false), expected, 1e-12);
  });
}

// Each rank's part in pieces, of which the last one's backward completes the gradients; parts may be empty.
TEST_P(DataParallelWorlds, SeveralBackwardsThatAreAveragedOnceTrainAsOnOneDevice) {
  const auto make = [] {
    auto module = std::make_shared<SharedMlp>();
    module->to(torch::kDouble);
    return module;
  };
  for (const int64_t size : {13, 3}) {
    const Batch whole = whole_batch(size, {6}, 3, torch::kDouble);
    const auto single = make();
    const auto start = copy_of(single->named_parameters(), false);
    for (int i = 0; i < 2; ++i) F::cross_entropy(single->forward(whole.x), whole.y).backward();
    const auto expected = copy_of(single->named_parameters(), true);

    lockstep::run(lockstep::test_devices(world()), [&](Rank& rank) {
      DataParallel net(make(), rank, options());
      {
        const torch::NoGradGuard no_grad;
        for (auto& item : net->named_parameters()) item.value().copy_(start.at(item.key()));
      }
      const Batch mine = part_of_batch(whole, rank);
      for (int i = 0; i < 2; ++i) {
        net.backward_through([&] {
          for (int64_t sample = 0; sample < mine.size(); ++sample) {
            std::optional<lockstep::NoSync> more_to_come;
            if (sample + 1 < mine.size()) more_to_come.emplace(net.replica());
            const Tensor loss = F::cross_entropy(net(mine.x.narrow(0, sample, 1)), mine.y.narrow(0, sample, 1));
            (loss * net.weight_of(1, mine.global_size)).backward();
          }
        });
      }
      expect_near(copy_of(net->named_parameters(), true), expected, 1e-12);
    });
  }
}

TEST(DataParallelTest, TakesModulesByValueByHolderAndByPointer) {
  lockstep::run(lockstep::test_devices(2), [](Rank& rank) {
    DataParallel by_value(SharedMlp(), rank);
    DataParallel by_holder(torch::nn::Linear(6, 3), rank);
    DataParallel by_pointer(std::make_shared<SharedMlp>(), rank);
    EXPECT_EQ(by_value(torch::ones({2, 6})).sizes(), (std::vector<int64_t>{2, 3}));
    EXPECT_EQ(by_holder(torch::ones({2, 6})).sizes(), (std::vector<int64_t>{2, 3}));
    EXPECT_EQ(by_pointer->parameters().size(), 4u);
  });
}

TEST(DataParallelTest, GradientsAreTheSameBitsOnAllRanksAndInEveryRun) {
  const Batch whole = whole_batch(11, {1, 28, 28}, 10, torch::kFloat);
  std::map<std::string, Tensor> first;
  for (int repeat = 0; repeat < 3; ++repeat) {
    std::vector<std::map<std::string, Tensor>> gradients(3);
    lockstep::run(lockstep::test_devices(3), [&](Rank& rank) {
      const auto module = rank.in_turn([] { return torch::manual_seed(5), convolutions(); });
      DataParallel net(module, rank);
      net.loss(part_of_batch(whole, rank), F::cross_entropy).backward();
      gradients[rank.index()] = copy_of(net->named_parameters(), true);
    });
    if (first.empty()) first = gradients[0];
    for (const auto& mine : gradients) {
      for (const auto& [name, gradient] : first) EXPECT_TRUE(torch::equal(mine.at(name), gradient)) << name;
    }
  }
}

// A Rank is a value: a copy of it is enough for as long as run() lasts.
TEST(DataParallelTest, LivesOnALocalGroup) {
  const Batch whole = whole_batch(4, {6}, 3, torch::kFloat);
  lockstep::run(lockstep::test_devices(2), [&](Rank& rank) {
    const auto net = [&] {
      Rank group = rank.group(0);
      return std::make_unique<DataParallel<UnusedBranch>>(std::make_shared<UnusedBranch>(), group);
    }();
    net->loss(part_of_batch(whole, rank), F::cross_entropy).backward();
    const Tensor gradient = (*net)->used->weight.grad().clone();
    rank.broadcast(gradient);
    EXPECT_TRUE(gradient.equal((*net)->used->weight.grad()));
    EXPECT_GT(gradient.abs().sum().item<double>(), 0);
  });
}

}  // namespace data_parallel_test
