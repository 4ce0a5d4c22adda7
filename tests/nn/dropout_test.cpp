// Labels: concurrency 2x2 2x4
// Dropout: the same masks over any number of ranks and in parts; and training with it as on one device.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/data_parallel/data_parallel.hpp>
#include <lockstep/nn/dropout.hpp>

#include "nn/random_layers.hpp"
#include "support/dropout_training.hpp"
#include "support/group_tests.hpp"

#include <cmath>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace lockstep {
namespace dropout_test {

using torch::Tensor;
using torch::nn::Sequential;
namespace F = torch::nn::functional;

constexpr int64_t kSeed = DropoutTraining::kSeed;

using DropoutWorlds = Worlds;
INSTANTIATE_TEST_SUITE_P(Sizes, DropoutWorlds, testing::Values(1, 2, 3, 4),
                         [](const auto& info) { return std::to_string(info.param) + "Ranks"; });

Dropout named(const DropoutImpl::Options& options, const std::string& name = "drop") {
  Dropout dropout(options);
  dropout->set_name(name);
  return dropout;
}

// Gives `x`, the samples of a global batch, as one device's dropout leaves it.
Tensor dropped(const Dropout& layer, const Tensor& x, int64_t step = 0, uint64_t seed = kSeed) {
  const SampleScope scope({.seed = seed, .step = step, .first = 0, .size = x.size(0)});
  return Dropout(layer)->forward(x);
}

// ---- Masks.

TEST_P(DropoutWorlds, MasksAreThoseOfOneDevice) {
  const Tensor x = torch::ones({10, 3, 5});
  const Tensor whole = dropped(named({.p = 0.4}), x, /*step=*/2);
  on_ranks([&](Rank& rank) {
    const Dropout layer = named({.p = 0.4});
    const Range part = part_of(10, rank.index(), rank.world_size());
    const SampleScope scope({.seed = kSeed, .step = 2, .first = part.begin, .size = part.size()});
    EXPECT_TRUE(Dropout(layer)->forward(slice_of(x, 0, rank)).equal(slice_of(whole, 0, rank)));
  });
}

TEST_P(DropoutWorlds, SlicesDropWhatTheWholeDrops) {
  const Tensor x = torch::ones({4, 7, 3, 2}), features = torch::ones({4, 12});
  for (const bool whole_channels : {false, true}) {
    const Tensor whole = dropped(named({.whole_channels = whole_channels}), x);
    const Tensor whole_features = dropped(named({}), features);
    on_ranks([&](Rank& rank) {
      const auto slice = [&](int64_t dim, int64_t total) {
        return DropoutImpl::Options::Slice{dim, total, rank.index(), rank.world_size()};
      };
      const Dropout channels = named({.whole_channels = whole_channels, .slice = slice(1, 7)});
      EXPECT_TRUE(dropped(channels, slice_of(x, 1, rank)).equal(slice_of(whole, 1, rank)));
      const Dropout equal_slices = named({.slice = slice(-1, 0)});  // slices of 12 features
      EXPECT_TRUE(dropped(equal_slices, slice_of(features, 1, rank)).equal(slice_of(whole_features, 1, rank)));
    });
  }
}

TEST(DropoutTest, MasksFollowSeedStepNameCallAndPlace) {
  const Tensor x = torch::ones({2, 500});
  const Dropout layer = named({});
  const Tensor mask = dropped(layer, x);
  EXPECT_TRUE(dropped(layer, x).equal(mask));
  EXPECT_TRUE(dropped(layer, x.to(torch::kDouble)).equal(mask.to(torch::kDouble)));
  const auto differs = [&](const Tensor& other) {  // in about half of the values
    const auto share = other.ne(mask).to(torch::kDouble).mean().item<double>();
    return share > 0.4 && share < 0.6;
  };
  EXPECT_TRUE(differs(dropped(layer, x, /*step=*/1)));
  EXPECT_TRUE(differs(dropped(layer, x, 0, kSeed + 1)));
  EXPECT_TRUE(differs(dropped(named({}, "other"), x)));
  EXPECT_TRUE(differs(mask.flip(0)));
  {
    const SampleScope scope({.seed = kSeed, .first = 0, .size = 2});
    EXPECT_TRUE(Dropout(layer)->forward(x).equal(mask));
    EXPECT_TRUE(differs(Dropout(layer)->forward(x)));  // its second call
  }
  {  // several rows of each sample are each their own
    const SampleScope scope({.seed = kSeed, .first = 3, .size = 2});
    const Tensor rows = Dropout(named({}))->forward(torch::ones({6, 50}));
    const SampleScope second({.seed = kSeed, .first = 4, .size = 1});
    EXPECT_TRUE(Dropout(named({}))->forward(torch::ones({3, 50})).equal(rows.slice(0, 3, 6)));
  }
  {  // layers without a name go by their turn
    Sequential net(Dropout(0.5), Dropout(0.5));
    const SampleScope scope({.seed = kSeed, .first = 0, .size = 2});
    const Tensor first = net[0]->as<Dropout>()->forward(x), second = net[1]->as<Dropout>()->forward(x);
    EXPECT_FALSE(first.equal(second));
  }
}

// So that a checkpoint's run goes on with another version of the library, and on another kind of device.
TEST(DropoutTest, MasksStayWhatTheyWere) {
  const Tensor kept = dropped(named({.p = 0.25}, "drop6"), torch::ones({2, 16}), /*step=*/3).ne(0);
  std::vector<std::string> rows(2);
  for (int64_t i = 0; i < 2; ++i) {
    for (int64_t j = 0; j < 16; ++j) rows[static_cast<size_t>(i)] += kept[i][j].item<bool>() ? '1' : '0';
  }
  EXPECT_THAT(rows, testing::ElementsAre("0011101111101101", "1111111110111110"));
}

TEST(DropoutTest, KeepsAsManyAsAskedAndScalesThemAndTheirGradients) {
  for (const double p : {0.1, 0.5, 0.9}) {
    Tensor x = torch::rand({40, 1000}, torch::kDouble).add(1).requires_grad_();
    const Tensor y = dropped(named({.p = p}), x);
    const double kept = y.ne(0).to(torch::kDouble).mean().item<double>();
    EXPECT_NEAR(kept, 1 - p, 4 * std::sqrt(p * (1 - p) / 40000));  // four standard deviations
    const Tensor factor = y.detach().ne(0).to(torch::kDouble) / (1 - p);
    expect_near(y.detach(), x.detach() * factor, 1e-15, "values");
    y.sum().backward();
    expect_near(x.grad(), factor, 1e-15, "gradients");
    // neighbours are independent
    const Tensor centred = y.detach().ne(0).to(torch::kDouble) - kept;
    for (const int64_t dim : {0, 1}) {
      const Tensor products = centred.narrow(dim, 1, x.size(dim) - 1) * centred.narrow(dim, 0, x.size(dim) - 1);
      EXPECT_NEAR(products.mean().item<double>(), 0, 4 * p * (1 - p) / std::sqrt(39000.0)) << dim;
    }
  }
  const Tensor x = torch::ones({3, 4});
  EXPECT_TRUE(dropped(named({.p = 0}), x).is_same(x));
  EXPECT_TRUE(dropped(named({.p = 1}), x).eq(0).all().item<bool>());
  EXPECT_TRUE(dropped(named({}), torch::ones({0, 4})).equal(torch::ones({0, 4})));
  Dropout layer = named({});
  layer->eval();
  EXPECT_TRUE(dropped(layer, x).is_same(x));
}

// ---- Training.

using DropoutTrainingWorlds = DropoutTraining;
INSTANTIATE_TEST_SUITE_P(Sizes, DropoutTrainingWorlds, testing::Values(1, 2, 3, 4),
                         [](const auto& info) { return std::to_string(info.param) + "Ranks"; });

TEST_P(DropoutTrainingWorlds, IsThatOfOneDeviceInPartsToo) {
  for (const int64_t parts : {1, 3, 2}) {
    BatchOptions sampling = batches_;
    if (parts == 2) sampling.shares.assign(static_cast<size_t>(GetParam()), 1), sampling.shares[0] = 3;
    on_seeded_ranks(GetParam(), [&](Rank& rank) {
      DataParallel net(copy_of(start_), rank);
      torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
      for (auto& batch : batches(data_, sampling, rank)) {
        sgd.zero_grad();
        const auto all = batch.in_parts(parts);
        for (size_t i = 0; i < all.size(); ++i) {
          std::optional<NoSync> more_to_come;
          if (i + 1 < all.size()) more_to_come.emplace(net.replica());
          net.loss(all[i], F::cross_entropy).backward();
        }
        sgd.step();
      }
      expect_trained(net->named_parameters());
    });
  }
}

TEST_P(DropoutTrainingWorlds, GoesOnAtTheStepThatItIsTold) {
  on_seeded_ranks(GetParam(), [&](Rank& rank) {
    std::optional<DataParallel<torch::nn::SequentialImpl>> net(std::in_place, copy_of(start_), rank);
    auto sgd = std::make_unique<torch::optim::SGD>((*net)->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    for (auto& batch : batches(data_, batches_, rank)) {
      if (net->steps_done() == 2) {  // the weights and the optimizer stay, all else is new
        net.emplace(std::static_pointer_cast<torch::nn::SequentialImpl>((**net).shared_from_this()), rank);
        EXPECT_EQ(net->steps_done(), 0);
        net->set_steps_done(2);
      }
      sgd->zero_grad();
      net->loss(batch, F::cross_entropy).backward();
      sgd->step();
    }
    expect_trained((*net)->named_parameters());
  });
}

// Three whole batches, of 11, 11 and 2 samples, add up in one step: each drops its own values, however cut.
TEST_P(DropoutTrainingWorlds, BatchesThatAddUpDropDifferentValuesAsOnOneDevice) {
  const auto trained_alone = [&](bool masks_differ) {
    Sequential net = copy_of(start_);
    name_dropouts(*net);
    int64_t number = 0;
    for (auto& batch : batches(data_, batches_)) {
      const SampleScope scope({.seed = kSeed, .batch = number, .first = 0, .size = batch.size()});
      F::cross_entropy(net->forward(batch.x), batch.y).backward();
      if (masks_differ) ++number;
    }
    return net->parameters();
  };
  const auto expected = trained_alone(true);
  EXPECT_FALSE(torch::allclose(expected[0].grad(), trained_alone(false)[0].grad()));
  for (const std::string how : {"whole", "in parts", "of one's own"}) {
    on_seeded_ranks(GetParam(), [&](Rank& rank) {
      DataParallel net(copy_of(start_), rank);
      std::vector<Batch> parts;
      for (auto& batch : batches(data_, batches_, rank)) {
        for (const auto& part : batch.in_parts(how == "in parts" ? 3 : 1)) {
          parts.push_back(how == "of one's own" ? Batch{part.x, part.y, part.global_size} : part);
        }
      }
      for (int step = 0; step < 2; ++step) {  // from the first batch again
        net->zero_grad();
        net.set_steps_done(0);
        if (step == 1) std::ignore = net.loss(parts.back(), F::cross_entropy);  // forwards alone do not count
        for (size_t i = 0; i < parts.size(); ++i) {
          std::optional<NoSync> more_to_come;
          if (i + 1 < parts.size()) more_to_come.emplace(net.replica());
          net.loss(parts[i], F::cross_entropy).backward();
        }
        for (size_t i = 0; i < expected.size(); ++i) {
          expect_near(net->parameters()[i].grad(), expected[i].grad(), 1e-10, how + std::to_string(i));
        }
      }
    });
  }
}

// Two runs give the same bits, though their ranks draw at the same time.
TEST_P(DropoutTrainingWorlds, OfTwoRunsGivesTheSameBits) {
  std::vector<std::vector<Tensor>> trained(2);
  for (auto& weights : trained) {
    on_seeded_ranks(GetParam(), [&](Rank& rank) {
      DataParallel net(copy_of(start_), rank);
      torch::optim::SGD sgd(net->parameters(), 0.1);
      for (auto& batch : batches(data_, batches_, rank)) {
        sgd.zero_grad();
        {
          const SampleScope scope = net.samples(batch);
          const Tensor noise = torch::rand({3}, rank.generator());
          const Tensor loss =
              batch.size() == 0 ? Tensor() : F::cross_entropy(net(batch.x), batch.y) * (1 + 0 * noise.sum());
          net.mean(loss, batch.size(), batch.global_size).backward();
        }
        sgd.step();
      }
      if (rank.index() + 1 == rank.world_size()) weights = net->parameters();
    });
  }
  for (size_t i = 0; i < trained[0].size(); ++i) EXPECT_TRUE(trained[0][i].equal(trained[1][i])) << i;
}

// ---- A block that backward computes again.

struct BlockCall {
  Sequential block;
  SampleScope::Kept kept;
};

struct Again : torch::autograd::Function<Again> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x, BlockCall* call) {
    call->kept = SampleScope::keep();
    context->saved_data["call"] = reinterpret_cast<int64_t>(call);
    context->save_for_backward({x});
    return call->block->forward(x);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    auto* const call = reinterpret_cast<BlockCall*>(context->saved_data["call"].toInt());
    const Tensor x = context->get_saved_variables()[0].detach().requires_grad_();
    const torch::AutoGradMode with_grad(true);
    const SampleScope scope(call->kept);
    call->block->forward(x).backward(gradients[0]);
    return {x.grad(), {}};
  }
};

struct UsedTwice : torch::nn::Module {
  explicit UsedTwice(bool computes_again) : again(computes_again) {
    for (const auto& parameter : parameters()) torch::nn::init::uniform_(parameter, -0.5, 0.5);
    to(torch::kDouble);
  }
  Tensor through_block(const Tensor& x) {
    if (!again) return block->forward(x);
    calls.push_back({block, {}});
    return Again::apply(x, &calls.back());
  }
  Tensor forward(const Tensor& x) { return through_block(through_block(first(x))); }

  const bool again;
  torch::nn::Linear first = register_module("first", torch::nn::Linear(6, 6));
  Sequential block = register_module("block", Sequential(torch::nn::Linear(6, 6), Dropout(0.4)));
  std::deque<BlockCall> calls;
};

TEST_P(DropoutTrainingWorlds, DropsTheSameWhereBackwardComputesABlockAgain) {
  std::vector<std::vector<Tensor>> trained;
  for (const bool again : {false, true}) {
    on_seeded_ranks(GetParam(), [&](Rank& rank) {
      const auto module = rank.in_turn([&] {
        torch::manual_seed(3);
        return std::make_shared<UsedTwice>(again);
      });
      DataParallel net(module, rank, {.overlap = false});
      torch::optim::SGD sgd(net->parameters(), 0.1);
      for (auto& batch : batches(data_, batches_, rank)) {
        sgd.zero_grad();
        net.loss(batch, F::cross_entropy).backward();
        sgd.step();
      }
      if (rank.index_in_process() > 0) return;
      trained.emplace_back();
      for (const auto& parameter : net->parameters()) trained.back().push_back(on_host(parameter.detach()));
    });
  }
  for (size_t i = 0; i < trained[0].size(); ++i) EXPECT_TRUE(trained[0][i].equal(trained[1][i])) << i;
}

// ---- What cannot be known, and what is said.

TEST(DropoutTest, SaysWhatItNeeds) {
  const auto error_in_run = [](int ranks, const std::function<void(DataParallel<torch::nn::SequentialImpl>&)>& use) {
    return error_on_ranks(ranks, [&](Rank& rank) {
      DataParallel net(Sequential({{"drop", Dropout(0.5)}}), rank);
      use(net);
    });
  };
  const Tensor x = torch::ones({4, 3}), y = torch::zeros({4}, torch::kLong);
  EXPECT_THAT(error_in_run(1, [&](auto& net) { net(x); }), Refused());
  EXPECT_THAT(error_of([&] {
                const SampleScope scope(SampleScope::keep());  // there is no scope to keep
                named({})->forward(x);
              }),
              Refused());
  EXPECT_THAT(error_in_run(2, [&](auto& net) { std::ignore = net.loss({x, y, 16}, F::cross_entropy); }), Refused());
  EXPECT_EQ(error_in_run(2, [&](auto& net) { std::ignore = net.loss({x, y, 8}, F::cross_entropy); }), "(no error)");
  EXPECT_EQ(error_in_run(2, [&](auto& net) { std::ignore = net.loss({x, y, 16, 4}, F::cross_entropy); }), "(no error)");
  EXPECT_EQ(error_in_run(1,
                         [&](auto& net) {
                           net->eval();
                           net(x);
                         }),
            "(no error)");
  EXPECT_THAT(error_of([&] {
                const SampleScope scope({.first = 0, .size = 3});
                Dropout(0.5)->forward(x);
              }),
              Refused());
  EXPECT_THAT(error_of([] { Dropout(1.5); }), Refused());
  EXPECT_THAT(error_of([] { Batch{torch::ones({2}), torch::ones({2}), 2}.in_parts(0); }), Refused());
}

TEST(DropoutTest, OutsideOfRunsDrawsAsLibTorchs) {
  const Tensor x = torch::ones({40, 50});
  torch::manual_seed(1);
  const Tensor mine = Dropout(0.3)->forward(x);
  torch::manual_seed(1);
  EXPECT_TRUE(mine.equal(torch::nn::Dropout(0.3)->forward(x)));
}

TEST(BatchInParts, KeepsPlacesAndSizes) {
  const Batch batch{torch::arange(7), torch::arange(7) * 2, 20, 13};
  const auto parts = batch.in_parts(3);
  ASSERT_EQ(parts.size(), 3u);
  int64_t next = 0;
  for (const auto& part : parts) {
    EXPECT_EQ(part.first, 13 + next);
    EXPECT_EQ(part.global_size, 20);
    EXPECT_TRUE(part.x.equal(batch.x.slice(0, next, next + part.size())));
    EXPECT_TRUE(part.y.equal(2 * part.x));
    next += part.size();
  }
  EXPECT_EQ(next, 7);
  EXPECT_EQ(batch.in_parts(9).size(), 7u);
  const Batch empty{torch::ones({0}), torch::ones({0}), 2};
  ASSERT_EQ(empty.in_parts(3).size(), 1u);
  EXPECT_EQ(empty.in_parts(3)[0].first, -1);
}

// ---- A rank's own numbers.

TEST_P(DropoutWorlds, ARanksGeneratorIsItsOwnAndTheSameInEveryRun) {
  std::vector<Tensor> drawn(static_cast<size_t>(GetParam()));
  for (int round = 0; round < 2; ++round) {
    const auto draw = [&](Rank& rank) {
      EXPECT_EQ(rank.seed(), static_cast<uint64_t>(kSeed));
      Rank group = rank.group(0);
      const Tensor numbers = torch::cat({torch::rand({4}, rank.generator()), torch::rand({4}, group.generator())});
      EXPECT_FALSE(numbers.slice(0, 0, 4).equal(numbers.slice(0, 4, 8)));  // the same one, which goes on
      Tensor& before = drawn[static_cast<size_t>(rank.index())];
      if (round == 1) EXPECT_TRUE(numbers.equal(before));
      before = numbers;
      const Tensor first = numbers.clone();
      rank.broadcast(first);
      if (rank.index() > 0) EXPECT_FALSE(numbers.equal(first));
    };
    run(test_devices(GetParam()), draw, {.seed = kSeed});
  }
}

}  // namespace dropout_test
}  // namespace lockstep
