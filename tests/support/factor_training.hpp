// A training by grains of a net of linear layers that hand over factors (nn/factors_scope.hpp), and what takes them:
// for tests of such layers, which compare the training's bits on many layouts of the ranks.
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <lockstep/data_parallel/data_parallel.hpp>
#include <lockstep/data_parallel/optimizer.hpp>

#include "data_parallel/loss_part.hpp"
#include "nn/factors_scope.hpp"
#include "tensor_bits.hpp"
#include "test_devices.hpp"

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace lockstep {

// Takes the factors of one weight.
struct HandedFactors {
  const at::Tensor weight;
  const bool takes = true;
  std::vector<GradientFactors> factors = {};

  FactorsScope scope(const at::Tensor& root) {
    return FactorsScope(root, [this](const at::Tensor& parameter, const GradientFactors& here) {
      if (takes && parameter.is_same(weight)) factors.push_back(here);
      return takes && parameter.is_same(weight);
    });
  }
};

// Writes each result to the same memory, which is right as long as a forward follows the backward before.
struct SameMemoryImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    if (!memory.defined() || memory.sizes() != x.sizes()) memory = torch::empty_like(x);
    memory = memory.detach();
    return memory.copy_(x);
  }
  at::Tensor memory;
};
TORCH_MODULE(SameMemory);

template <class Linear>
struct FactorNet : torch::nn::Module {
  FactorNet() {
    in = register_module("in", Linear(40, 72));
    shared = register_module("shared", Linear(72, 72));
    rare = register_module("rare", Linear(72, 72));
    single = register_module("single", Linear(72, 72));
    out = register_module("out", Linear(72, 3));
    same_memory = register_module("same_memory", SameMemory());
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor h = torch::relu(in(x));
    for (int i = 0; i < 3; ++i) h = torch::tanh(shared(h));
    if (x[0][0].template item<float>() > 0) h = h + rare(h);
    return out(torch::tanh(single(same_memory(h))));
  }
  Linear in{nullptr}, shared{nullptr}, rare{nullptr}, single{nullptr}, out{nullptr};
  SameMemory same_memory{nullptr};
};

struct FactorLayout {
  int ranks = 1;
  Sharded sharded = Sharded::nothing;
  bool overlap = true;
  int64_t bucket_bytes = 4 << 20;
  std::function<std::shared_ptr<GrainCheck>()> check = [] { return nullptr; };  // makes one for each rank
  bool has_hooks = false;  // hooks see the gradients, so that there must be some
};

// Gives the weights after two epochs of batches of 172 samples in grains of 20, the last of 12, which is too small for
// factors.
template <class Linear>
TensorBits train_by_factors(const FactorLayout& layout) {
  torch::manual_seed(4);
  const Dataset data{torch::randn({400, 40}), torch::randint(3, {400}, torch::kLong)};
  TensorBits bits;
  run(test_devices(layout.ranks), [&](Rank& rank) {
    const auto module = rank.in_turn([] { return torch::manual_seed(5), std::make_shared<FactorNet<Linear>>(); });
    module->to(rank.device());
    if (layout.has_hooks) {
      for (const auto& parameter : module->parameters()) parameter.register_hook([](const at::Tensor&) {});
    }
    DataParallel net(module, rank,
                     {.bucket_bytes = layout.bucket_bytes,
                      .first_bucket_bytes = layout.bucket_bytes,
                      .overlap = layout.overlap,
                      .sharded = layout.sharded,
                      .grain_check = layout.check()});
    Optimizer sgd(net, torch::optim::SGDOptions(0.1));
    for (int epoch = 0; epoch < 2; ++epoch) {
      const BatchOptions options{.size = 172, .seed = 6, .epoch = epoch, .grain = 20};
      for (const auto& batch : batches(data.to(rank.device()), options, rank)) {
        sgd.zero_grad();
        late_loss_of(net.replica(), batch, [&](const Batch& grain) {
          return torch::nn::functional::cross_entropy(net(grain.x), grain.y);
        }).backward();
        sgd.step();
      }
    }
    if (rank.index() == 0) bits = tensor_bits(*module);
  });
  return bits;
}

// Expects the bits of a net whose hooks see the gradients, on layouts of all kinds; `check` makes one with checked
// grains.
template <class Linear>
void expect_the_same_bits_on_any_layout(const std::function<std::shared_ptr<GrainCheck>()>& check) {
  const auto train = train_by_factors<Linear>;
  const TensorBits gradients = train({.has_hooks = true});
  for (const int ranks : {1, 2, 3, 5}) EXPECT_EQ(train({.ranks = ranks}), gradients) << ranks;
  EXPECT_EQ(train({.ranks = 3, .has_hooks = true}), gradients);
  EXPECT_EQ(train({.ranks = 1, .overlap = false}), gradients);
  EXPECT_EQ(train({.ranks = 2, .overlap = false}), gradients);
  EXPECT_EQ(train({.ranks = 3, .bucket_bytes = 1}), gradients);
  EXPECT_EQ(train({.ranks = 2, .check = check}), gradients);
  EXPECT_EQ(train({.ranks = 3, .sharded = Sharded::state}), gradients);
  EXPECT_EQ(train({.ranks = 3, .sharded = Sharded::gradients}), gradients);
}

}  // namespace lockstep
