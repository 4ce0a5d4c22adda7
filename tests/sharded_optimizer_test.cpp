// ShardedOptimizer over 1 to 4 CPU ranks, against the same optimizer on whole parameters.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/data_parallel.hpp>
#include <lockstep/sharded_optimizer.hpp>

#include "group_tests.hpp"

#include <memory>
#include <string>
#include <vector>

namespace lockstep {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using torch::Tensor;
namespace F = torch::nn::functional;
namespace nn = torch::nn;
namespace optim = torch::optim;

INSTANTIATE_TEST_SUITE_P(Sizes, Worlds, testing::Values(1, 2, 3, 4),
                         [](const auto& info) { return std::to_string(info.param) + "Ranks"; });

struct Case {
  std::string name;
  ShardedOptimizer::Factory make;
};

std::vector<Case> cases() {
  const auto sgd = [](auto slices) {
    return std::make_unique<optim::SGD>(slices, optim::SGDOptions(0.1).momentum(0.9).nesterov(true).weight_decay(0.01));
  };
  const auto adam = [](auto slices) { return std::make_unique<optim::Adam>(slices, optim::AdamOptions(0.01)); };
  const auto adam_w = [](auto slices) {
    return std::make_unique<optim::AdamW>(slices, optim::AdamWOptions(0.01).weight_decay(0.1).amsgrad(true));
  };
  return {{"SGD", sgd}, {"Adam", adam}, {"AdamW", adam_w}};
}

// Of 164 float64 and 7 float32, which 3 ranks and none of 2 to 4 share out equally; one is frozen, one not used.
struct NetImpl : nn::Cloneable<NetImpl> {
  NetImpl() { reset(); }
  void reset() override {
    conv = register_module("conv", nn::Conv2d(2, 3, 3));
    linear = register_module("linear", nn::Linear(12, 8));
    linear->to(torch::kDouble);
    conv->to(torch::kDouble);
    frozen = register_parameter("frozen", torch::ones({2}, torch::kDouble), /*requires_grad=*/false);
    unused = register_parameter("unused", torch::ones({3}, torch::kDouble));
    scale = register_parameter("scale", torch::ones({7}));
    conv->weight.set_data(conv->weight.detach().contiguous(at::MemoryFormat::ChannelsLast));
  }
  Tensor forward(const Tensor& x) { return linear(torch::tanh(conv(x)).flatten(1)) * frozen.sum(); }
  // What is rounded to float32 stays apart from the rest.
  Tensor loss(const Tensor& y_hat, const Tensor& y) const { return F::cross_entropy(y_hat, y) + scale.square().mean(); }
  nn::Conv2d conv{nullptr};
  nn::Linear linear{nullptr};
  Tensor frozen, unused, scale;
};
TORCH_MODULE(Net);

std::vector<Batch> make_batches() {
  std::vector<Batch> batches;
  for (const int64_t size : {7, 2, 5, 3}) {  // of 2 and 3 samples some ranks have none
    batches.push_back({torch::randn({size, 2, 4, 4}, torch::kDouble), torch::randint(8, {size}), size});
  }
  return batches;
}

Batch part_for(const Batch& whole, const Rank& rank) {
  return {slice_of(whole.x, 0, rank), slice_of(whole.y, 0, rank), whole.global_size};
}

Net copy_of(const Net& net) {
  return {std::dynamic_pointer_cast<NetImpl>(net->clone())};
}

TEST_P(Worlds, UpdatesAreThoseOfTheWholeOptimizer) {
  for (const auto& [name, make] : cases()) {
    Net start, single = copy_of(start);
    const auto batches = make_batches();
    std::vector<Tensor> learnt;
    for (const auto& parameter : single->parameters()) {
      if (parameter.requires_grad()) learnt.push_back(parameter);
    }
    const auto whole = make(learnt);
    for (const auto& batch : batches) {
      whole->zero_grad(/*set_to_none=*/false);
      single->loss(single->forward(batch.x), batch.y).backward();
      if (!single->unused.grad().defined()) single->unused.mutable_grad() = torch::zeros_like(single->unused);
      whole->step();
    }
    for (const bool average : {false, true}) {
      if (average && name != "SGD") continue;
      on_ranks([&, &name = name, &make = make](Rank& rank) {
        DataParallel net(copy_of(start), rank, {.average = average});
        ShardedOptimizer sharded(net->parameters(), rank, make);
        for (size_t step = 0; step < batches.size(); ++step) {
          step % 2 == 0 ? sharded.zero_grad() : net->zero_grad();
          const auto criterion = [&](const Tensor& y_hat, const Tensor& y) { return net->loss(y_hat, y); };
          net.loss(part_for(batches[step], rank), criterion).backward();
          sharded.step();
        }
        for (const auto& item : net->named_parameters()) {
          const std::string what = name + (average ? ", averaged before, " : ", ") + item.key();
          const bool single_precision = item.value().scalar_type() == torch::kFloat;
          expect_near(item.value().detach(), single->named_parameters()[item.key()].detach(),
                      single_precision ? 1e-5 : 1e-12, what);
          expect_equal_on_all_ranks(item.value(), rank, what);
        }
        EXPECT_EQ(net->conv->weight.strides(), start->conv->weight.strides());
      });
    }
  }
}

int64_t state_bytes(const optim::Optimizer& adam) {
  int64_t bytes = 0;
  for (const auto& [key, state] : adam.state()) {
    const auto& of_slice = static_cast<const optim::AdamParamState&>(*state);
    bytes += static_cast<int64_t>(of_slice.exp_avg().nbytes() + of_slice.exp_avg_sq().nbytes());
  }
  return bytes;
}

TEST_P(Worlds, StateOfEachRankIsItsShareOfTheWhole) {
  on_ranks([](Rank& rank) {
    DataParallel net(nn::Linear(15, 64), rank, {.average = false});  // 1024 values
    ShardedOptimizer adam(net->parameters(), rank,
                          [](auto slices) { return std::make_unique<optim::Adam>(slices, optim::AdamOptions(0.1)); });
    const Batch batch{torch::ones({2, 15}), torch::zeros({2}, torch::kLong), 2 * rank.world_size()};
    net.loss(batch, F::cross_entropy).backward();
    adam.step();
    const int64_t values = (1024 + rank.world_size() - 1) / rank.world_size();
    EXPECT_EQ(state_bytes(adam.optimizer()), 2 * values * 4);
  });
}

TEST(ShardedOptimizer, ReducesAndGathersOncePerStep) {
  run(cpus(2), [](Rank& rank) {
    const auto calls = std::make_shared<CountingBackend::Calls>();
    Rank counting = counted(rank, calls);
    DataParallel net(nn::Linear(3, 2), counting, {.average = false});
    ShardedOptimizer sgd(net->parameters(), counting, cases()[0].make);
    calls->clear();
    net.loss({torch::ones({1, 3}), torch::zeros({1}, torch::kLong), 2}, F::cross_entropy).backward();
    sgd.step();
    EXPECT_THAT(*calls, ElementsAre("reduce_scatter", "allgather"));
  });
}

TEST(ShardedOptimizer, AccumulatesOverBackwards) {
  torch::manual_seed(3);
  Net start, single = copy_of(start);
  const auto batches = make_batches();
  optim::SGD whole(single->parameters(), 0.1);
  for (const auto& batch : batches) F::cross_entropy(single->forward(batch.x), batch.y).backward();
  whole.step();
  run(cpus(3), [&](Rank& rank) {
    DataParallel net(copy_of(start), rank, {.average = false});
    ShardedOptimizer sgd(net->parameters(), rank, [](auto s) { return std::make_unique<optim::SGD>(s, 0.1); });
    for (const auto& batch : batches) net.loss(part_for(batch, rank), F::cross_entropy).backward();
    sgd.step();
    expect_near(net->linear->weight.detach(), single->linear->weight.detach(), 1e-12, "linear.weight");
  });
}

TEST(ShardedOptimizer, SaysWhatItCannotShard) {
  const auto nothing = [](auto) { return std::unique_ptr<optim::Optimizer>(); };
  const auto sgd = [](auto slices) { return std::make_unique<optim::SGD>(slices, 0.1); };
  EXPECT_THAT(error_on_ranks(1, [&](Rank& rank) { ShardedOptimizer({torch::ones({2})}, rank, sgd); }),
              HasSubstr("no parameter that needs a gradient"));
  const auto weights = [] { return std::vector<Tensor>{torch::ones({2}).requires_grad_()}; };
  EXPECT_THAT(error_on_ranks(1, [&](Rank& rank) { ShardedOptimizer(weights(), rank, nothing); }),
              HasSubstr("made no optimizer"));
  EXPECT_THAT(error_on_ranks(1,
                             [&](Rank& rank) {
                               nn::Embedding table(nn::EmbeddingOptions(4, 2).sparse(true));
                               ShardedOptimizer sharded(table->parameters(), rank, sgd);
                               table->zero_grad();
                               table(torch::tensor({1})).sum().backward();
                               sharded.step();
                             }),
              HasSubstr("sparse"));
}

}  // namespace
}  // namespace lockstep
