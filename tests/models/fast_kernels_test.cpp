// Labels: concurrency arithmetic
// FastKernels: a net of LibTorch's own modules computes the same, by lockstep's kernels where these suit.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/data/data.hpp>
#include <lockstep/data_parallel/data_parallel.hpp>
#include <lockstep/devices/autocast.hpp>
#include <lockstep/devices/memory_format.hpp>
#include <lockstep/models/fast_kernels.hpp>
#include <lockstep/models/gpt.hpp>
#include <lockstep/models/linear.hpp>
#include <lockstep/nn/tensor_files.hpp>

#include "devices/micro_kernel.hpp"
#include "models/kernels/kernels.hpp"
#include "support/group_tests.hpp"

#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

namespace lockstep {
namespace fast_kernels_test {

namespace F = torch::nn::functional;
namespace nn = torch::nn;
using torch::Tensor;
using torch::autograd::variable_list;

// A forward of somebody's own, with members of LibTorch's types.
struct NetImpl : nn::Module {
  Tensor forward(const Tensor& x) {  // [n, 1, 8, 8] -> [n, 10]
    const Tensor y = torch::relu(other(torch::relu(conv(x))));
    const Tensor pixels = y.flatten(2).permute({2, 0, 1});
    return hidden(std::get<0>(attention(pixels, pixels, pixels)).mean(0));
  }
  nn::Conv2d conv = register_module("conv", nn::Conv2d(nn::Conv2dOptions(1, 32, 3).padding(1)));
  nn::Conv2d other = register_module("other", nn::Conv2d(nn::Conv2dOptions(32, 32, 3).padding(1)));
  nn::MultiheadAttention attention = register_module("attention", nn::MultiheadAttention(32, 4));
  nn::Linear hidden = register_module("hidden", nn::Linear(32, 10));
};
TORCH_MODULE(Net);

Net net_of(torch::Dtype type = torch::kFloat) {
  torch::manual_seed(1);
  Net net;
  set_memory_format(*net, at::MemoryFormat::ChannelsLast);
  net->to(type);
  return net;
}

// The result, and the gradients of x and of all parameters.
variable_list results_of(Net net, bool fast) {
  torch::manual_seed(2);
  const Tensor x = torch::randn({6, 1, 8, 8}).to(net->hidden->weight.scalar_type()).requires_grad_();
  const FastKernels kernels(fast);
  variable_list results = {net->forward(x)}, inputs = net->parameters();
  inputs.push_back(x);
  for (const auto& grad : torch::autograd::grad({results[0].square().sum()}, inputs)) results.push_back(grad);
  return results;
}

TEST(FastKernels, ComputesWhatLibTorchComputes) {
  const variable_list fast = results_of(net_of(), true), expected = results_of(net_of(torch::kDouble), true);
  const variable_list plain = results_of(net_of(torch::kDouble), false);
  for (size_t i = 0; i < fast.size(); ++i) {
    EXPECT_TRUE(fast[i].to(torch::kDouble).allclose(plain[i], 1e-4, 1e-5)) << i;
    EXPECT_TRUE(expected[i].equal(plain[i])) << i << ": LibTorch computes float64";
  }
}

std::string way_of(const Tensor& y) {
  return y.grad_fn()->name();
}

TEST(FastKernels, AreThoseOfTheLayersWithKernels) {
  Net net = net_of();
  const Tensor image = torch::randn({6, 32, 8, 8}).contiguous(at::MemoryFormat::ChannelsLast);
  const Tensor rows = torch::randn({64, 32});
  const auto plain = [&] { return way_of(net->other->forward(image)) + way_of(net->hidden->forward(rows)); };
  const std::string before = plain();
  {
    const FastKernels fast;
    const Tensor y = net->other->forward(image);
    EXPECT_EQ(way_of(y).find("Winograd") != std::string::npos, kernels::of_this_cpu().winograd != nullptr);
    EXPECT_EQ(way_of(net->hidden->forward(rows)), way_of(fast_linear(rows, net->hidden->weight, net->hidden->bias)));
    EXPECT_TRUE(net->hidden->forward(rows).equal(fast_linear(rows, net->hidden->weight, net->hidden->bias)));
    std::thread([&] { EXPECT_EQ(plain(), before) << "another thread"; }).join();
    const FastKernels off(/*enabled=*/false);
    EXPECT_EQ(plain(), before);
  }
  EXPECT_EQ(plain(), before);
}

// Queries, keys and values lie in memory as three Linears give them.
struct Heads {
  Tensor part(int64_t length = 64) const { return torch::randn({3, length, 2, 8}).transpose(1, 2).requires_grad_(); }

  // Gives the result and the gradients.
  static variable_list attend(const Tensor& queries, const Tensor& keys, const Tensor& values, double dropout = 0,
                              bool is_causal = true, std::optional<double> scale = {}) {
    variable_list results = {at::scaled_dot_product_attention(queries, keys, values, {}, dropout, is_causal, scale)};
    for (const auto& grad : torch::autograd::grad({results[0].square().sum()}, {queries, keys, values})) {
      results.push_back(grad);
    }
    return results;
  }
  const Tensor queries = part(), keys = part(), values = part();
};

TEST(FastKernels, ComputesCausalAttentionAsItsOwn) {
  torch::manual_seed(4);
  const Heads heads;
  const variable_list plain = Heads::attend(heads.queries, heads.keys, heads.values);
  const FastKernels kernels;
  const variable_list fast = Heads::attend(heads.queries, heads.keys, heads.values);
  for (size_t i = 0; i < fast.size(); ++i) {
    EXPECT_TRUE(has_micro_kernel() ? fast[i].allclose(plain[i], 1e-4, 1e-5) : fast[i].equal(plain[i])) << i;
  }
  if (!has_micro_kernel()) return;
  const Tensor qkv = torch::cat({heads.queries, heads.keys, heads.values}, 1).transpose(1, 2).flatten(2);
  EXPECT_TRUE(fast[0].transpose(1, 2).flatten(2).equal(causal_attention(qkv, 2)));
}

TEST(FastKernels, LeavesOtherAttentionToLibTorch) {
  torch::manual_seed(5);
  const Heads heads;
  const Tensor long_part = heads.part(65), wide = torch::randn({3, 2, 64, 24}).requires_grad_();
  const Tensor doubles = heads.queries.detach().to(torch::kDouble).requires_grad_();
  const auto all = [&] {
    const auto& [q, k, v] = std::tie(heads.queries, heads.keys, heads.values);
    std::vector<variable_list> results = {Heads::attend(q, k, v, 0, /*is_causal=*/false),
                                          Heads::attend(q, k, v, 0, true, /*scale=*/0.5),
                                          Heads::attend(q, k, wide),
                                          Heads::attend(q, long_part, long_part),
                                          Heads::attend(long_part, long_part, long_part),
                                          Heads::attend(doubles, doubles, doubles)};
    torch::manual_seed(6);
    results.push_back(Heads::attend(q, k, v, /*dropout=*/0.5));
    const Tensor none = q.slice(0, 0, 0);
    results.push_back({at::scaled_dot_product_attention(none, none, none, {}, 0, true)});
    const Autocast bf16(torch::kCPU);
    results.push_back({at::scaled_dot_product_attention(q, k, v, {}, 0, true)});
    return results;
  };
  const auto plain = all();
  const FastKernels kernels;
  const auto fast = all();
  for (size_t i = 0; i < fast.size(); ++i) {
    EXPECT_EQ(way_of(fast[i][0]), way_of(plain[i][0])) << i;
    for (size_t k = 0; k < fast[i].size(); ++k) EXPECT_TRUE(fast[i][k].equal(plain[i][k])) << i << " " << k;
  }
}

// The convolution's gradient calls a convolution, which must not be the same again.
TEST(FastKernels, CanBeDifferentiatedTwice) {
  const auto second = [](Net net, bool fast) {
    const FastKernels kernels(fast);
    const Tensor x = torch::ones({6, 1, 8, 8}, net->hidden->weight.options());
    const auto first = torch::autograd::grad({net->forward(x).pow(2).sum()}, net->parameters(), {}, true, true);
    Tensor sum = torch::zeros({}, x.options());
    for (const Tensor& grad : first) sum = sum + grad.square().sum();
    return torch::autograd::grad({sum}, net->parameters(), {}, {}, false, /*allow_unused=*/true);
  };
  const auto fast = second(net_of(), true), expected = second(net_of(torch::kDouble), false);
  for (size_t i = 0; i < fast.size(); ++i) {
    ASSERT_EQ(fast[i].defined(), expected[i].defined());
    if (fast[i].defined()) EXPECT_TRUE(fast[i].to(torch::kDouble).allclose(expected[i], 1e-3, 1e-3)) << i;
  }
}

TEST(FastKernels, LeavesAutocastToLibTorch) {
  Net net = net_of();
  const Tensor x = torch::randn({6, 1, 8, 8});
  const Autocast bf16(torch::kCPU);
  const Tensor expected = net->forward(x);
  const FastKernels fast;
  EXPECT_TRUE(net->forward(x).equal(expected));
}

// Grains, and ZeRO that gathers the parameters which the kernels read.
TEST(FastKernels, GivesTheSameBitsOnAnyNumberOfRanks) {
  torch::manual_seed(3);
  const Dataset data{torch::randint(256, {32, 1, 8, 8}, torch::kByte), torch::randint(10, {32}, torch::kLong)};
  const auto hash_on = [&](int ranks, Sharded sharded) {
    std::string hash;
    run(test_devices(ranks), [&](Rank& rank) {
      const FastKernels fast;
      DataParallel net(rank.in_turn([] { return net_of(); }), rank, {.sharded = sharded});
      Optimizer sgd(net, torch::optim::SGDOptions(0.1));
      for (auto& batch : batches(data.to(rank.device()), {.size = 16, .grain = 4}, rank)) {
        sgd.zero_grad();
        net.loss(batch, F::cross_entropy).backward();
        sgd.step();
      }
      const auto whole = net.whole();
      if (rank.index() == 0) hash = weights_hash(*net);
    });
    return hash;
  };
  const std::string alone = hash_on(1, Sharded::nothing);
  for (const int ranks : {2, 3}) EXPECT_EQ(hash_on(ranks, Sharded::nothing), alone) << ranks;
  EXPECT_EQ(hash_on(2, Sharded::parameters), alone);
}

}  // namespace fast_kernels_test
}  // namespace lockstep
