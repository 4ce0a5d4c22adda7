// Labels: concurrency arithmetic 3x3 2x4
// A net with divided parameters over 1 to 4 CPU ranks: against LibTorch on one device, and whole parameters on the same
// ranks; and what it refuses.
#include <ATen/CPUGeneratorImpl.h>
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/data_parallel/check_replicas.hpp>
#include <lockstep/data_parallel/data_parallel.hpp>
#include <lockstep/data_parallel/optimizer.hpp>
#include <lockstep/data_parallel/sync_batch_norm.hpp>
#include <lockstep/nn/tensor_files.hpp>
#include <lockstep/nn/weights.hpp>
#include <lockstep/ranks/evaluate.hpp>

#include "ranks/trained_parameters.hpp"
#include "support/group_tests.hpp"
#include "support/scratch_folder.hpp"

#include <algorithm>
#include <filesystem>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

namespace lockstep {
namespace full_sharding_test {

using testing::HasSubstr;
using torch::Tensor;
namespace F = torch::nn::functional;
namespace nn = torch::nn;
namespace optim = torch::optim;

using FullShardingWorlds = Worlds;
INSTANTIATE_TEST_SUITE_P(Sizes, FullShardingWorlds, testing::Values(1, 2, 3, 4),
                         [](const auto& info) { return std::to_string(info.param) + "Ranks"; });

// For float64. The mean of a float32 parameter is a factor in the net below, and CUDA rounds that mean otherwise.
const double kSame = on_real_gpus() ? 1e-6 : 1e-10;

std::unique_ptr<optim::Optimizer> make_sgd(const Optimizer::Groups& groups) {
  return std::make_unique<optim::SGD>(groups, optim::SGDOptions(0.1).momentum(0.9).nesterov(true));
}

std::unique_ptr<optim::Optimizer> make_adam_w(const Optimizer::Groups& groups) {
  return std::make_unique<optim::AdamW>(groups, optim::AdamWOptions(0.01).weight_decay(0.1).amsgrad(true));
}

// The modules know nothing of units. There are tied weights, which are used at both ends; a parameter that nothing
// uses, and a frozen one; float32 in between.
struct BlockImpl : nn::Module {
  BlockImpl() {
    for (const auto& module : children()) module->to(torch::kDouble);
    unused = register_parameter("unused", torch::ones({3}, torch::kDouble));
  }
  Tensor forward(const Tensor& x) { return x + shrink(torch::tanh(grow(norm(x)))); }
  nn::LayerNorm norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({6})));
  nn::Linear grow = register_module("grow", nn::Linear(6, 11));
  nn::Linear shrink = register_module("shrink", nn::Linear(11, 6));
  Tensor unused;
};
TORCH_MODULE(Block);

struct TiedImpl : nn::Module {
  TiedImpl() {
    words->to(torch::kDouble);
    head_weight = register_parameter("head", words->weight);
    scale = register_parameter("scale", torch::ones({7}));
    frozen = register_parameter("frozen", torch::ones({2}, torch::kDouble), /*requires_grad=*/false);
  }
  Tensor forward(const Tensor& x) {
    Tensor h = words(x).mean(1) * (frozen.sum() * scale.mean().to(torch::kDouble));
    for (const auto& block : *blocks) h = block->as<Block>()->forward(h);
    return F::linear(h, head_weight);
  }
  nn::Embedding words = register_module("words", nn::Embedding(13, 6));
  nn::ModuleList blocks = register_module("blocks", nn::ModuleList(Block(), Block(), Block()));
  Tensor head_weight, scale, frozen;
};
TORCH_MODULE(Tied);

// Every rank, and every process, builds its own. All of these begin alike.
Tied make_tied(Rank* rank = nullptr) {
  const auto make = [] {
    torch::manual_seed(7);
    return Tied();
  };
  return rank == nullptr ? make() : rank->in_turn(make);
}

std::vector<Batch> make_batches() {
  torch::manual_seed(8);
  std::vector<Batch> batches;
  for (const int64_t size : {7, 2, 5, 3}) {  // some ranks have none of 2 and 3 samples
    batches.push_back({torch::randint(13, {size, 4}), torch::randint(13, {size}), size});
  }
  return batches;
}

Batch part_for(const Batch& whole, const Rank& rank) {
  return {slice_of(whole.x, 0, rank), slice_of(whole.y, 0, rank), whole.global_size};
}

std::vector<Tensor> trained_parameters(const nn::Module& net) {
  const TrainedParameters named(net);
  std::vector<Tensor> trained;
  for (const auto& [name, parameter] : named.all()) trained.push_back(parameter);
  return trained;
}

Optimizer::Groups in_one_group(const nn::Module& net) {
  return {optim::OptimizerParamGroup(trained_parameters(net))};
}

// On one device, from step `begin` to before `end`.
void train_whole(Tied& net, optim::Optimizer& optimizer, const std::vector<Batch>& batches, size_t begin, size_t end) {
  for (size_t step = begin; step < end; ++step) {
    optimizer.zero_grad();
    F::cross_entropy(net->forward(batches[step].x), batches[step].y).backward();
    optimizer.step();
  }
}

void train(DataParallel<TiedImpl>& net, Optimizer& optimizer, const std::vector<Batch>& batches, Rank& rank,
           size_t begin, size_t end) {
  for (size_t step = begin; step < end; ++step) {
    optimizer.zero_grad();
    net.loss(part_for(batches[step], rank), F::cross_entropy).backward();
    optimizer.step();
  }
}

void expect_trained_alike(const nn::Module& net, const nn::Module& expected, Rank& rank, const std::string& where) {
  for (const auto& item : net.named_parameters()) {
    const bool single_precision = item.value().scalar_type() == torch::kFloat;
    expect_near(item.value().detach(), expected.named_parameters()[item.key()].detach(),
                single_precision ? 1e-5 : kSame, where + item.key());
    expect_equal_on_all_ranks(item.value(), rank, where + item.key());
  }
}

// Runs of modules, units by hand, and units that are cut wherever a module ends.
std::vector<DataParallelOptions> ways() {
  return {{.sharded = Sharded::parameters},
          {.bucket_bytes = 1, .sharded = Sharded::parameters},
          {.bucket_bytes = 600, .overlap = false, .sharded = Sharded::parameters},
          {.bucket_bytes = 1, .sharded = Sharded::parameters, .units = {"blocks.0", "blocks.2"}}};
}

TEST_P(FullShardingWorlds, TrainsAsOneDevice) {
  const auto batches = make_batches();
  for (const auto& make : {make_sgd, make_adam_w}) {
    Tied whole = make_tied();
    const auto optimizer = make(in_one_group(*whole));
    train_whole(whole, *optimizer, batches, 0, batches.size());
    for (const auto& options : ways()) {
      on_ranks([&](Rank& rank) {
        const Tied module = make_tied(&rank);
        DataParallel net(module, rank, options);
        Optimizer optimizer(net, make);
        train(net, optimizer, batches, rank, 0, batches.size());
        for (const auto& parameter : module->parameters()) EXPECT_FALSE(parameter.grad().defined());
        expect_trained_alike(*module, *whole, rank, std::to_string(options.bucket_bytes) + " ");
        check_replicas(optimizer);
      });
    }
  }
}

TEST_P(FullShardingWorlds, AddsUpOverBackwardsReducedAndNot) {
  const auto batches = make_batches();
  Tied whole = make_tied();
  const auto sgd = make_sgd(in_one_group(*whole));
  for (const auto& batch : batches) F::cross_entropy(whole->forward(batch.x), batch.y).backward();
  sgd->step();
  for (const auto& options : ways()) {
    for (const size_t unreduced : {0, 2, 3}) {
      on_ranks([&](Rank& rank) {
        const Tied module = make_tied(&rank);
        DataParallel net(module, rank, options);
        Optimizer optimizer(net, make_sgd);
        for (size_t i = 0; i < batches.size(); ++i) {
          std::optional<NoSync> no_sync;
          if (i < unreduced) no_sync.emplace(net.replica());
          net.loss(part_for(batches[i], rank), F::cross_entropy).backward();
        }
        optimizer.step();
        expect_trained_alike(*module, *whole, rank, std::to_string(unreduced) + " unreduced, ");
      });
    }
  }
}

// The bits are those of every unit, of tied weights and of a parameter that nothing uses.
TEST(FullSharding, WithAGrainTheBitsAreThoseOfOneDevice) {
  at::Generator generator = at::detail::createCPUGenerator(3);
  const Dataset data{torch::randint(13, {31, 4}, generator), torch::randint(13, {31}, generator)};
  const auto bits_of = [&](int ranks, const DataParallelOptions& options) {
    std::string bits;
    run(test_devices(ranks), [&](Rank& rank) {
      DataParallel net(make_tied(&rank), rank, options);
      Optimizer adam(net, make_adam_w);
      for (const auto& batch : batches(data.to(rank.device()), {.size = 13, .grain = 3}, rank)) {
        adam.zero_grad();
        net.loss(batch, F::cross_entropy).backward();
        adam.step();
      }
      const auto whole = net.whole();
      EXPECT_FALSE(net->blocks[0]->as<Block>()->unused.grad().defined());
      if (rank.index() == 0) bits = weights_hash(*net);
    });
    return bits;
  };
  const std::string one = bits_of(1, {.sharded = Sharded::state});
  for (const auto& options : ways()) {
    for (const int ranks : {1, 2, 3, 4, 7}) EXPECT_EQ(bits_of(ranks, options), one) << ranks;
  }
}

// ---- Checkpoints.

struct Checkpoint {
  ScratchFolder folder;
  std::filesystem::path weights = folder / "weights", optimizer = folder / "optimizer";
};

void load_and_train(const Checkpoint& from, int ranks, const DataParallelOptions& options,
                    const std::vector<Batch>& batches, const Tied& expected) {
  run(test_devices(ranks), [&](Rank& rank) {
    const Tied module = make_tied(&rank);
    DataParallel net(module, rank, options);
    Optimizer adam(net, make_adam_w);
    {
      const auto whole = net.whole();
      load_weights(from.weights, *net);
    }
    adam.load(from.optimizer);
    train(net, adam, batches, rank, 2, batches.size());
    expect_trained_alike(*module, *expected, rank, "stage " + std::to_string(static_cast<int>(options.sharded)) + " ");
  });
}

TEST(FullSharding, CheckpointsGoOnAtAnyStageAndOnAnyNumberOfRanks) {
  const auto batches = make_batches();
  Tied expected = make_tied();
  train_whole(expected, *make_adam_w(in_one_group(*expected)), batches, 0, batches.size());
  const Checkpoint of_stage_3, of_stage_1;
  for (const auto sharded : {Sharded::state, Sharded::parameters}) {
    const Checkpoint& checkpoint = sharded == Sharded::parameters ? of_stage_3 : of_stage_1;
    run(test_devices(3), [&](Rank& rank) {
      DataParallel net(make_tied(&rank), rank, {.bucket_bytes = 600, .sharded = sharded});
      Optimizer adam(net, make_adam_w);
      train(net, adam, batches, rank, 0, 2);
      adam.save(checkpoint.optimizer);
      const auto whole = net.whole();
      if (rank.index() == 0) save_weights(checkpoint.weights, *net);
    });
  }
  load_and_train(of_stage_3, 1, {}, batches, expected);
  load_and_train(of_stage_3, 2, {.sharded = Sharded::state}, batches, expected);
  load_and_train(of_stage_3, 4, {.sharded = Sharded::parameters, .units = {"blocks"}}, batches, expected);
  load_and_train(of_stage_1, 2, {.bucket_bytes = 1, .sharded = Sharded::parameters}, batches, expected);
}

// ---- Whole parameters.

TEST_P(FullShardingWorlds, ParametersAreWholeWhileAWholeLives) {
  const auto batches = make_batches();
  Tied expected = make_tied();
  const auto sgd = make_sgd(in_one_group(*expected));
  train_whole(expected, *sgd, batches, 0, 1);
  {
    const torch::NoGradGuard no_grad;
    for (auto& parameter : trained_parameters(*expected)) parameter.mul_(2);
  }
  train_whole(expected, *sgd, batches, 1, 3);
  on_ranks([&](Rank& rank) {
    const Tied module = make_tied(&rank);
    DataParallel net(module, rank, {.bucket_bytes = 1, .sharded = Sharded::parameters});
    Optimizer optimizer(net, make_sgd);
    train(net, optimizer, batches, rank, 0, 1);
    {
      const auto whole = net.whole();
      const Dataset data{torch::ones({3, 4}, torch::kLong), torch::ones({3}, torch::kLong)};
      // A fourth rank has none of 3 samples, and does not compute. One rank may look at parameters alone.
      evaluate([&](const Tensor& x) { return net(x); }, data.to(rank.device()), rank);
      if (rank.index() == 0) EXPECT_TRUE(net->words->weight.sum().isfinite().item<bool>());
      const torch::NoGradGuard no_grad;
      for (auto& parameter : trained_parameters(*net)) parameter.data().mul_(2);  // data() leaves versions alone
    }
    {
      const auto whole = net.whole();  // also while it trains
      train(net, optimizer, batches, rank, 1, 2);
      expect_equal_on_all_ranks(net->words->weight, rank, "words");
    }
    train(net, optimizer, batches, rank, 2, 3);
    expect_trained_alike(*module, *expected, rank, "");
  });
}

TEST(FullSharding, KeepsWhatIsChangedInPlace) {
  run(test_devices(2), [](Rank& rank) {
    const nn::Sequential layers(nn::Linear(5, 7), nn::Linear(7, 3));
    DataParallel net(layers, rank, {.bucket_bytes = 1, .sharded = Sharded::parameters});
    {
      const torch::InferenceMode inference;
      net(torch::ones({2, 5}));
    }
    const torch::NoGradGuard no_grad;
    for (auto& parameter : layers->parameters()) parameter.fill_(3);
    for (const auto& parameter : layers->parameters()) EXPECT_TRUE(parameter.eq(3).all().item<bool>());
  });
}

// A kernel that has begun knows the tensor's address, whatever operators it calls.
TEST(FullSharding, WhatAnOperatorWasGivenStaysUntilItsEnd) {
  run(test_devices(2), [](Rank& rank) {
    const nn::Sequential layers(nn::Linear(4, 4), nn::Linear(4, 4));
    const DataParallel net(layers, rank, {.bucket_bytes = 1, .sharded = Sharded::parameters});
    const Tensor first = layers->parameters()[0], second = layers->parameters()[2];
    EXPECT_THAT(any_error_of([&] { first.const_data_ptr<float>(); }), HasSubstr("not allocated yet"));
    const auto kernel = [&] {
      RECORD_USER_SCOPE_WITH_INPUTS("kernel", std::vector<c10::IValue>({first, second}));
      const float* const address = first.const_data_ptr<float>();
      second.sum();
      EXPECT_EQ(first.const_data_ptr<float>(), address);
    };
    kernel();
    second.sum();
    EXPECT_EQ(first.storage().nbytes(), 0u);
  });
}

// ---- What fails, and what is refused.

TEST(FullSharding, ARankThatUsesOtherParametersIsToldSo) {
  const auto error = error_on_ranks(2, [](Rank& rank) {
    const nn::Sequential layers(nn::Linear(4, 4), nn::Linear(4, 4));
    DataParallel net(layers, rank, {.bucket_bytes = 1, .sharded = Sharded::parameters});
    layers->parameters()[rank.index() == 0 ? 0 : 2].sum();
    net(torch::ones({1, 4}));
  });
  // The other rank's operator may be the first to fail, and throws LibTorch's own exception.
  EXPECT_THAT(error, testing::AnyOf(Fails(Error::difference), Fails(Error::user_code)));
}

TEST(FullSharding, ARankThatFailsIsNamedAndNobodyWaits) {
  for (const bool in_backward : {false, true}) {
    const auto error = error_on_ranks(3, [&](Rank& rank) {
      const bool fails = rank.index() == 1;
      nn::Sequential layers(nn::Linear(4, 4), Lambda([&](const Tensor& x) {
                              if (fails && !in_backward) throw std::runtime_error("no more memory");
                              if (fails)
                                x.register_hook([](const Tensor&) { throw std::runtime_error("no more memory"); });
                              return x;
                            }),
                            nn::Linear(4, 4), nn::Linear(4, 4));
      DataParallel net(layers, rank, {.bucket_bytes = 1, .sharded = Sharded::parameters});
      Optimizer optimizer(net, make_sgd);
      net.loss({torch::ones({1, 4}), torch::zeros({1}, torch::kLong), 3}, F::cross_entropy).backward();
      optimizer.step();
    });
    EXPECT_THAT(error, Fails(Error::user_code, {1}));
  }
}

TEST(FullSharding, AfterwardsParametersAreGone) {
  run(test_devices(1), [](Rank& rank) {
    nn::Linear module(2, 2);
    { const DataParallel net(module, rank, {.sharded = Sharded::parameters}); }
    EXPECT_THAT(any_error_of([&] {
                  module(torch::ones({1, 2}));
                }),
                HasSubstr("the DataParallel that sharded these parameters among the ranks is gone"));
  });
}

Caught refused(const DataParallelOptions& options) {
  return error_on_ranks(1, [&](Rank& rank) { DataParallel(make_tied(&rank), rank, options); });
}

TEST(FullSharding, WhatItCannotDoIsRefused) {
  const auto refused_units = [](const std::vector<std::string>& units) {
    return refused({.sharded = Sharded::parameters, .units = units});
  };
  EXPECT_THAT(refused_units({"blocks.7"}), Refused());
  EXPECT_THAT(refused_units({"blocks", "blocks.1"}), Refused());
  EXPECT_THAT(refused_units({"blocks.1", "blocks.1"}), Refused());
  EXPECT_THAT(error_on_ranks(1,
                             [](Rank& rank) {
                               DataParallel(nn::Sequential(SyncBatchNorm(nn::BatchNormOptions(2), rank)), rank,
                                            {.sharded = Sharded::parameters});
                             }),
              Refused());
}

}  // namespace full_sharding_test
}  // namespace lockstep
