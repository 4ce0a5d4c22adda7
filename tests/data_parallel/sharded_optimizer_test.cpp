// Labels: concurrency arithmetic 3x3 2x4
// An Optimizer over 1 to 4 CPU ranks, of whole parameters and of slices, against LibTorch's on one device.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/data_parallel/data_parallel.hpp>
#include <lockstep/data_parallel/optimizer.hpp>
#include <lockstep/optim/decay_groups.hpp>

#include "data_parallel/net_optimizer.hpp"
#include "io/checked_tensors.hpp"
#include "optim/optimizer_state.hpp"
#include "support/group_tests.hpp"
#include "support/scratch_folder.hpp"

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace lockstep {
namespace sharded_optimizer_test {

using torch::Tensor;
namespace F = torch::nn::functional;
namespace nn = torch::nn;
namespace optim = torch::optim;

using ShardedOptimizerWorlds = Worlds;
INSTANTIATE_TEST_SUITE_P(Sizes, ShardedOptimizerWorlds, testing::Values(1, 2, 3, 4),
                         [](const auto& info) { return std::to_string(info.param) + "Ranks"; });

struct Case {
  std::string name;
  Optimizer::Make make;
};

std::vector<Case> cases() {
  const auto sgd = [](auto groups) {
    return std::make_unique<optim::SGD>(groups, optim::SGDOptions(0.1).momentum(0.9).nesterov(true).weight_decay(0.01));
  };
  const auto adam = [](auto groups) { return std::make_unique<optim::Adam>(groups, optim::AdamOptions(0.01)); };
  const auto adam_w = [](auto groups) {
    return std::make_unique<optim::AdamW>(groups, optim::AdamWOptions(0.01).weight_decay(0.1).amsgrad(true));
  };
  return {{"SGD", sgd}, {"Adam", adam}, {"AdamW", adam_w}};
}

// It has 164 float64 values, which 3 ranks cannot share out equally, and 7 float32 values, which 2 to 4 cannot. One
// parameter is frozen, one is not used.
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
  // The part that is rounded to float32 stays apart from the rest.
  Tensor loss(const Tensor& y_hat, const Tensor& y) const { return F::cross_entropy(y_hat, y) + scale.square().mean(); }
  nn::Conv2d conv{nullptr};
  nn::Linear linear{nullptr};
  Tensor frozen, unused, scale;
};
TORCH_MODULE(Net);

std::vector<Batch> make_batches() {
  std::vector<Batch> batches;
  for (const int64_t size : {7, 2, 5, 3}) {  // some ranks have none of 2 and 3 samples
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

void train_whole(Net& net, const std::vector<Batch>& batches, optim::Optimizer* whole) {
  for (const auto& batch : batches) {
    whole->zero_grad();
    net->loss(net->forward(batch.x), batch.y).backward();
    whole->step();
  }
}

Optimizer::Groups in_one_group(const nn::Module& net) {
  return {optim::OptimizerParamGroup(net.parameters())};
}

// LibTorch's optimizer of whole parameters, on one device.
Net trained_whole(const Net& start, const std::vector<Batch>& batches, const Optimizer::Make& make) {
  Net net = copy_of(start);
  train_whole(net, batches, make(in_one_group(*net)).get());
  return net;
}

void expect_trained_alike(const NetImpl& net, const Net& expected, Rank& rank, const std::string& where) {
  for (const auto& item : net.named_parameters()) {
    const std::string what = where + item.key();
    const bool single_precision = item.value().scalar_type() == torch::kFloat;
    expect_near(item.value().detach(), expected->named_parameters()[item.key()].detach(),
                single_precision ? 1e-5 : 1e-12, what);
    expect_equal_on_all_ranks(item.value(), rank, what);
  }
}

void backward(DataParallel<NetImpl>& net, const Batch& batch, const Rank& rank) {
  net.loss(part_for(batch, rank), [&](const Tensor& y_hat, const Tensor& y) { return net->loss(y_hat, y); }).backward();
}

// 256 bytes: four buckets of float64 and one of float32.
std::vector<DataParallelOptions> ways() {
  return {{},
          {.sharded = Sharded::state},
          {.bucket_bytes = 256, .sharded = Sharded::state},
          {.bucket_bytes = 256, .sharded = Sharded::gradients},
          {.bucket_bytes = 256, .overlap = false, .sharded = Sharded::gradients}};
}

TEST_P(ShardedOptimizerWorlds, UpdatesAreThoseOfTheWholeOptimizer) {
  for (const auto& [name, make] : cases()) {
    const Net start;
    const auto batches = make_batches();
    const Net whole = trained_whole(start, batches, make);
    for (const auto& options : ways()) {
      on_ranks([&, &name = name, &make = make](Rank& rank) {
        Net module = copy_of(start);
        DataParallel net(module, rank, options);
        Optimizer optimizer(net, make);
        for (const auto& batch : batches) {
          optimizer.zero_grad();
          backward(net, batch, rank);
          EXPECT_EQ(module->linear->weight.grad().defined(), options.sharded == Sharded::nothing);
          EXPECT_FALSE(module->unused.grad().defined());
          optimizer.step();
        }
        expect_trained_alike(*module, whole, rank, name + " ");
        EXPECT_EQ(module->conv->weight.strides(), start->conv->weight.strides());
      });
    }
  }
}

// Each backward adds gradients: under no_sync on the rank, in a sharded net in the slice.
TEST_P(ShardedOptimizerWorlds, AccumulatesOverBackwards) {
  const Net start;
  const auto batches = make_batches();
  Net whole = copy_of(start);
  optim::SGD sgd(whole->parameters(), 0.1);
  for (const auto& batch : batches) whole->loss(whole->forward(batch.x), batch.y).backward();
  sgd.step();
  for (const auto& options : ways()) {
    for (const size_t unreduced : {0, 2, 3}) {
      on_ranks([&](Rank& rank) {
        const Net module = copy_of(start);
        DataParallel net(module, rank, options);
        Optimizer optimizer(net, optim::SGDOptions(0.1));
        backward(net, batches[0], rank);
        optimizer.zero_grad();  // nothing is left of what came before
        for (size_t i = 0; i < batches.size(); ++i) {
          std::optional<NoSync> no_sync;
          if (i < unreduced) no_sync.emplace(net.replica());
          backward(net, batches[i], rank);
        }
        optimizer.step();
        expect_trained_alike(*module, whole, rank, std::to_string(unreduced) + " unreduced, ");
      });
    }
    on_ranks([&](Rank& rank) {  // several backwards that are one for DataParallel, as a pipeline's microbatches are
      Net module = copy_of(start);
      DataParallel net(module, rank, options);
      Optimizer optimizer(net, optim::SGDOptions(0.1));
      net.backward_through([&] {
        for (size_t i = 0; i < batches.size(); ++i) {
          std::optional<NoSync> more_to_come;
          if (i + 1 < batches.size()) more_to_come.emplace(net.replica());
          const Batch part = part_for(batches[i], rank);
          if (part.size() == 0) continue;
          const Tensor loss = module->loss(net(part.x), part.y);
          loss.backward(torch::full_like(loss, net.weight_of(part.size(), part.global_size)));
        }
      });
      optimizer.step();
      expect_trained_alike(*module, whole, rank, "in one, ");
    });
  }
}

std::map<std::string, Tensor> by_name(const io::NamedTensors& state) {
  return {state.begin(), state.end()};
}

// Gives what rank 0 saves; the others have nothing.
std::map<std::string, Tensor> saved_state(Optimizer& optimizer, const Rank& rank) {
  const ScratchFolder folder;
  optimizer.save(folder / "optimizer");
  return rank.index() == 0 ? by_name(io::read_checked(folder / "optimizer")) : by_name({});
}

// In each backward one branch, on some ranks or on all.
struct BranchesImpl : nn::Cloneable<BranchesImpl> {
  BranchesImpl() { reset(); }
  void reset() override {
    for (auto& [name, branch] : branches) {
      branch = register_module(name, nn::Linear(6, 4));
      branch->to(torch::kDouble);
    }
  }
  Tensor forward(const Tensor& x) { return branches[branch].second(x); }
  std::vector<std::pair<std::string, nn::Linear>> branches{{"a", nullptr}, {"b", nullptr}, {"c", nullptr}};
  size_t branch = 0;
};

// In each step the backwards, and in each of these the branches that even and odd ranks use. Nobody uses c.
using Plan = std::vector<std::vector<std::pair<size_t, size_t>>>;
const Plan kAlternating = {{{0, 0}}, {{0, 1}}, {{1, 1}}, {{1, 1}}, {{0, 0}, {1, 1}}, {{0, 0}}};

// There are 2 samples, so some ranks have none.
std::vector<Batch> branch_batches() {
  std::vector<Batch> batches;
  for (const int64_t size : {5, 2, 5, 5, 2, 5}) {
    batches.push_back({torch::randn({size, 6}, torch::kDouble), torch::randint(4, {size}), size});
  }
  return batches;
}

// Computes on one device what `ranks` ranks compute.
void train_branches(BranchesImpl& net, optim::Optimizer& optimizer, const std::vector<Batch>& batches, int ranks,
                    size_t begin, size_t end) {
  for (size_t step = begin; step < end; ++step) {
    const Batch& batch = batches[step];
    optimizer.zero_grad();
    for (const auto& [even, odd] : kAlternating[step]) {
      for (int rank = 0; rank < ranks; ++rank) {
        const Range part = part_of(batch.size(), rank, ranks);
        if (part.size() == 0) continue;
        net.branch = rank % 2 == 0 ? even : odd;
        const Tensor loss = F::cross_entropy(net.forward(batch.x.slice(0, part.begin, part.end)),
                                             batch.y.slice(0, part.begin, part.end));
        (loss * static_cast<double>(part.size()) / static_cast<double>(batch.size())).backward();
      }
    }
    optimizer.step();
  }
}

void train_branches(BranchesImpl& module, DataParallel<BranchesImpl>& net, Optimizer& optimizer,
                    const std::vector<Batch>& batches, const Rank& rank, bool unreduced, size_t begin, size_t end) {
  for (size_t step = begin; step < end; ++step) {
    const Batch& batch = batches[step];
    optimizer.zero_grad();
    const auto& backwards = kAlternating[step];
    for (size_t i = 0; i < backwards.size(); ++i) {
      module.branch = rank.index() % 2 == 0 ? backwards[i].first : backwards[i].second;
      std::optional<NoSync> no_sync;
      if (unreduced && i + 1 < backwards.size()) no_sync.emplace(net.replica());
      net.loss(part_for(batch, rank), F::cross_entropy).backward();
    }
    for (const auto& item : module.named_parameters()) {
      if (item.key()[0] == 'c') EXPECT_FALSE(item.value().grad().defined()) << item.key();
    }
    optimizer.step();
  }
}

std::shared_ptr<BranchesImpl> copy_of(const std::shared_ptr<BranchesImpl>& net) {
  return std::dynamic_pointer_cast<BranchesImpl>(net->clone());
}

// The optimizer's state is left alone too: each parameter counts its own steps. One large bucket is shared out so that
// a parameter lies on two ranks.
TEST_P(ShardedOptimizerWorlds, ParametersThatNoRankUsedAreLeftAloneAsOnOneDevice) {
  const int ranks = GetParam();
  const auto start = std::make_shared<BranchesImpl>();
  const auto batches = branch_batches();
  for (const auto& [name, make] : {cases()[0], cases()[2]}) {
    const auto alone = copy_of(start);
    const auto whole = make(in_one_group(*alone));
    train_branches(*alone, *whole, batches, ranks, 0, kAlternating.size());
    io::NamedTensors parameters;
    for (const auto& item : alone->named_parameters()) parameters.emplace_back(item.key(), item.value());
    const auto expected = by_name(optimizer_state(*whole, parameters));
    EXPECT_TRUE(alone->branches[2].second->weight.equal(start->branches[2].second->weight));
    on_ranks([&, &name = name, &make = make](Rank& rank) {
      for (const auto& options :
           std::vector<DataParallelOptions>{{},
                                            {.bucket_bytes = 256, .sharded = Sharded::state},
                                            {.bucket_bytes = 256, .overlap = false, .sharded = Sharded::gradients},
                                            {.sharded = Sharded::gradients}}) {
        for (const bool unreduced : {false, true}) {
          const std::string where = name + ", stage " + std::to_string(static_cast<int>(options.sharded)) + ", ";
          const auto module = copy_of(start);
          DataParallel net(module, rank, options);
          Optimizer optimizer(net, make);
          train_branches(*module, net, optimizer, batches, rank, unreduced, 0, kAlternating.size());
          for (const auto& item : module->named_parameters()) {
            expect_near(item.value().detach(), alone->named_parameters()[item.key()].detach(), 1e-12,
                        where + item.key());
          }
          const auto state = saved_state(optimizer, rank);
          if (rank.index() > 0) continue;
          EXPECT_EQ(state.size(), expected.size()) << where;
          for (const auto& [key, value] : expected) expect_near(state.at(key), value, 1e-12, where + key);
        }
      }
    });
  }
}

// From `ranks` ranks to others.
void expect_state_goes_on(int ranks, int others) {
  const auto start = std::make_shared<BranchesImpl>();
  const auto batches = branch_batches();
  for (const auto& [name, make] : cases()) {
    const auto alone = copy_of(start);
    const auto whole = make(in_one_group(*alone));
    train_branches(*alone, *whole, batches, ranks, 0, 1);
    train_branches(*alone, *whole, batches, others, 1, kAlternating.size());
    const ScratchFolder folder;
    const auto file = folder / "optimizer";
    const auto half = copy_of(start);
    run(test_devices(ranks), [&, &make = make](Rank& rank) {
      const auto module = rank.index() == 0 ? half : copy_of(start);
      DataParallel net(module, rank, {.sharded = Sharded::gradients});
      Optimizer optimizer(net, make);
      train_branches(*module, net, optimizer, batches, rank, false, 0, 1);
      optimizer.save(file);
    });
    const auto kept = by_name(io::read_checked(file));
    EXPECT_EQ(kept.count("step.b.weight") + kept.count("momentum_buffer.b.weight"), 0u);
    run(test_devices(others), [&, &make = make, &name = name](Rank& rank) {
      const auto module = copy_of(half);
      DataParallel net(module, rank, {.bucket_bytes = 256, .sharded = Sharded::state});
      Optimizer optimizer(net, make);
      optimizer.load(file);
      train_branches(*module, net, optimizer, batches, rank, false, 1, kAlternating.size());
      for (const auto& item : module->named_parameters()) {
        expect_near(item.value().detach(), alone->named_parameters()[item.key()].detach(), 1e-12, name + item.key());
      }
    });
  }
}

TEST(ShardedOptimizer, AStateWithoutSomeParametersGoesToOtherRanks) {
  torch::manual_seed(6);
  for (const int ranks : {1, 2, 3, 4}) expect_state_goes_on(ranks, 5 - ranks);
}

TEST(ShardedOptimizer, RanksMayHaveNothingOfASmallNet) {
  const Batch batch{torch::ones({4, 1}), torch::ones({4, 1}), 4};
  const auto make = cases()[1].make;
  nn::Linear alone(1, 1);
  const nn::Linear start(std::dynamic_pointer_cast<nn::LinearImpl>(alone->clone()));
  const auto adam = make(in_one_group(*alone));
  F::mse_loss(alone(batch.x), batch.y).backward();
  adam->step();
  run(test_devices(4), [&](Rank& rank) {
    const auto module = std::dynamic_pointer_cast<nn::LinearImpl>(start->clone());
    DataParallel net(module, rank, {.sharded = Sharded::gradients});
    NetOptimizer optimizer(net.trained(), make, in_one_group, "Optimizer");
    net.loss(part_for(batch, rank), F::mse_loss).backward();
    optimizer.step({});
    expect_near(module->weight.detach(), alone->weight.detach(), 1e-6, "weight");
    expect_near(module->bias.detach(), alone->bias.detach(), 1e-6, "bias");
    const auto state = by_name(optimizer.state());
    EXPECT_EQ(state.at("exp_avg.weight").sizes(), at::IntArrayRef({1, 1}));
    EXPECT_EQ(state.at("step.bias").item<int64_t>(), 1);
    optimizer.load_state(optimizer.state());
  });
}

int64_t state_bytes(const optim::Optimizer& adam) {
  int64_t bytes = 0;
  for (const auto& [key, state] : adam.state()) {
    const auto& of_slice = static_cast<const optim::AdamParamState&>(*state);
    bytes += static_cast<int64_t>(of_slice.exp_avg().nbytes() + of_slice.exp_avg_sq().nbytes());
  }
  return bytes;
}

TEST_P(ShardedOptimizerWorlds, StateOfEachRankIsItsShareOfTheWhole) {
  on_ranks([](Rank& rank) {
    DataParallel net(nn::Linear(15, 64), rank, {.sharded = Sharded::gradients});  // 1024 values
    Optimizer adam(net, optim::AdamOptions(0.1));
    const Batch batch{torch::ones({2, 15}), torch::zeros({2}, torch::kLong), 2 * rank.world_size()};
    net.loss(batch, F::cross_entropy).backward();
    adam.step();
    const int64_t lines = 1024 / 64;  // slices begin at whole lines of 64 values
    const int64_t share = (lines + rank.world_size() - 1) / rank.world_size() * 64;
    const int64_t values = std::min(share, 1024 - share * rank.index());
    EXPECT_EQ(state_bytes(adam.inner()), 2 * values * 4);
  });
}

TEST(ShardedOptimizer, ItsStateIsThatOfTheWholeAndGoesToOtherRanks) {
  torch::manual_seed(5);
  const Net start;
  const auto batches = make_batches();
  const std::vector<Batch> first(batches.begin(), batches.begin() + 2);
  for (const auto& [name, make] : cases()) {
    const Net whole = trained_whole(start, batches, make);
    io::NamedTensors kept;
    Net half = copy_of(start);
    run(test_devices(3), [&, &make = make](Rank& rank) {
      const Net module = copy_of(start);
      DataParallel net(module, rank, {.bucket_bytes = 256, .sharded = Sharded::gradients});
      NetOptimizer optimizer(net.trained(), make, in_one_group, "Optimizer");
      for (const auto& batch : first) {
        backward(net, batch, rank);
        optimizer.step({});
      }
      const auto state = optimizer.state();
      for (const auto& [key, value] : state) expect_equal_on_all_ranks(value, rank, key);
      if (rank.index() == 0) {
        kept = state;
        const torch::NoGradGuard no_grad;
        for (auto& item : half->named_parameters()) item.value().copy_(module->named_parameters()[item.key()]);
      }
    });
    const std::string member = name == "SGD" ? "momentum_buffer" : "exp_avg";
    EXPECT_EQ(by_name(kept).at(member + ".conv.weight").sizes(), start->conv->weight.sizes());
    EXPECT_EQ(by_name(kept).count(member + ".frozen"), 0);
    if (name != "SGD") EXPECT_EQ(by_name(kept).at("step.linear.bias").item<int64_t>(), 2);
    run(test_devices(2), [&, &make = make, &name = name](Rank& rank) {
      const Net module = copy_of(half);
      DataParallel net(module, rank, {.bucket_bytes = 500, .sharded = Sharded::state});
      NetOptimizer optimizer(net.trained(), make, in_one_group, "Optimizer");
      optimizer.load_state(kept);
      for (size_t step = 2; step < batches.size(); ++step) {
        optimizer.zero_grad();
        backward(net, batches[step], rank);
        optimizer.step({});
      }
      expect_trained_alike(*module, whole, rank, name + " resumed, ");
    });
  }
}

// ---- Groups of parameters, each with options of its own.

// Weights decay. Biases do not, and learn more slowly.
std::vector<Case> cases_in_groups() {
  const auto with_two_ways = [](auto made) {
    Optimizer::set_weight_decay(made->param_groups()[1], 0);
    made->param_groups()[1].options().set_lr(0.02);
    return made;
  };
  const auto sgd = [=](const auto& groups) {
    return with_two_ways(std::make_unique<optim::SGD>(groups, optim::SGDOptions(0.1).momentum(0.9).weight_decay(0.3)));
  };
  const auto adam_w = [=](const auto& groups) {
    return with_two_ways(std::make_unique<optim::AdamW>(groups, optim::AdamWOptions(0.05).weight_decay(0.3)));
  };
  return {{"SGD", sgd}, {"AdamW", adam_w}};
}

// Trains some steps on `ranks` ranks and the others on `others`, whose slices are other ones.
void expect_groups_train_alike(int ranks, int others, const std::string& name, const Optimizer::Make& make,
                               Sharded sharded) {
  const Net start, half = copy_of(start);
  Net whole = copy_of(start);
  const auto batches = make_batches();
  train_whole(whole, batches, make(decay_groups(*whole)).get());
  const auto train = [&](DataParallel<NetImpl>& net, Optimizer& optimizer, Rank& rank, size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      optimizer.zero_grad();
      backward(net, batches[i], rank);
      optimizer.step();
    }
  };
  const ScratchFolder folder;
  run(test_devices(ranks), [&](Rank& rank) {
    DataParallel net(rank.index() == 0 ? half : copy_of(start), rank, {.bucket_bytes = 256, .sharded = sharded});
    Optimizer optimizer(net, make, decay_groups);
    EXPECT_EQ(optimizer.param_groups().size(), 2u);
    train(net, optimizer, rank, 0, 2);
    optimizer.save(folder / "optimizer");
  });
  run(test_devices(others), [&](Rank& rank) {
    const Net module = copy_of(half);
    DataParallel net(module, rank, {.sharded = sharded});
    Optimizer optimizer(net, make, decay_groups);
    optimizer.load(folder / "optimizer");
    train(net, optimizer, rank, 2, batches.size());
    expect_trained_alike(*module, whole, rank, name + " in groups, ");
  });
}

TEST(ShardedOptimizer, GroupsHaveTheirOwnOptionsAsOnOneDevice) {
  torch::manual_seed(7);
  for (const auto& [name, make] : cases_in_groups()) {
    for (const int ranks : {1, 2, 3}) {
      for (const auto sharded : {Sharded::nothing, Sharded::state, Sharded::gradients}) {
        expect_groups_train_alike(ranks, 4 - ranks, name, make, sharded);
      }
    }
  }
}

}  // namespace sharded_optimizer_test
}  // namespace lockstep
