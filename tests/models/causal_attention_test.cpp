// Labels: arithmetic
// causal_attention computes what LibTorch's attention computes, with the gradient, whatever its kernels are.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <lockstep/models/gpt.hpp>

#include "devices/micro_kernel.hpp"
#include "support/intra_op_threads.hpp"

#include <array>
#include <cmath>
#include <cstdint>

namespace causal_attention_test {

using lockstep::causal_attention;
using torch::Tensor;

Tensor plain_attention(const Tensor& qkv, int64_t heads) {
  auto parts = qkv.chunk(3, -1);
  for (auto& part : parts) part = part.unflatten(-1, {heads, -1}).transpose(1, 2);
  const int64_t length = qkv.size(1);
  const Tensor later = torch::ones({length, length}, torch::kBool).triu(1);
  const Tensor scores = parts[0].matmul(parts[1].transpose(2, 3)) / std::sqrt(parts[0].size(3));
  return scores.masked_fill(later, -INFINITY).softmax(-1).matmul(parts[2]).transpose(1, 2).flatten(2);
}

void expect_alike(const Tensor& one, const Tensor& other) {
  EXPECT_EQ(one.sizes(), other.sizes());
  EXPECT_LE((one - other).abs().max().item<double>(), 1e-5 * other.abs().max().item<double>());
}

TEST(CausalAttention, ComputesWhatPlainOperatorsCompute) {
  torch::manual_seed(1);
  for (const auto& [samples, length, heads, size] :
       {std::array<int64_t, 4>{2, 1, 1, 4}, {1, 5, 2, 3}, {3, 64, 2, 32}, {1, 65, 3, 16}, {2, 150, 1, 40}}) {
    SCOPED_TRACE(c10::str(samples, ", ", length, ", ", heads, ", ", size));
    const Tensor qkv = (2 * torch::randn({samples, length, 3 * heads * size})).requires_grad_();
    const Tensor y = causal_attention(qkv, heads), expected = plain_attention(qkv, heads);
    expect_alike(y, expected);
    const Tensor grad = torch::randn(y.sizes());
    expect_alike(torch::autograd::grad({y}, {qkv}, {grad})[0], torch::autograd::grad({expected}, {qkv}, {grad})[0]);
  }
}

// Otherwise the other tests would compare LibTorch with itself.
TEST(CausalAttention, TakesTheMicroKernelUntilOneDnnIsTurnedOff) {
  const auto is_own = [] {
    const Tensor qkv = torch::ones({1, 8, 12}, torch::requires_grad());
    return causal_attention(qkv, 2).grad_fn()->name().find("MicroKernelAttention") != std::string::npos;
  };
  EXPECT_EQ(is_own(), lockstep::has_micro_kernel());
  at::globalContext().setUserEnabledMkldnn(false);
  EXPECT_FALSE(is_own());
  at::globalContext().setUserEnabledMkldnn(true);
}

TEST(CausalAttention, TakesNotDenseAndOtherTensors) {
  torch::manual_seed(2);
  const Tensor qkv = torch::randn({70, 2, 24}).transpose(0, 1);
  expect_alike(causal_attention(qkv, 2), plain_attention(qkv, 2));
  const Tensor wide = torch::randn({2, 70, 24}, torch::kDouble);
  EXPECT_EQ(causal_attention(wide, 2).scalar_type(), torch::kDouble);
  expect_alike(causal_attention(wide, 2), plain_attention(wide, 2));
}

// Tokens near before the NaN may get it: its value counts zero times, which is NaN, in LibTorch too.
TEST(CausalAttention, TellsLaterTokensOfANaNAndNoOtherSample) {
  torch::manual_seed(3);
  const Tensor qkv = torch::randn({2, 100, 24});
  qkv[1][70].fill_(NAN);
  const Tensor nan = causal_attention(qkv, 2).isnan();
  EXPECT_FALSE(nan[0].any().item<bool>());
  EXPECT_TRUE(nan[1].narrow(0, 70, 30).all().item<bool>());
}

TEST(CausalAttention, HasOtherBitsNeitherInABatchNorOnMoreThreads) {
  torch::manual_seed(4);
  const auto both = [](const Tensor& start) {
    const Tensor qkv = start.detach().requires_grad_();
    const Tensor y = causal_attention(qkv, 2);
    return torch::cat({y.detach(), torch::autograd::grad({y.square().sum()}, {qkv})[0]}, -1);
  };
  const Tensor qkv = torch::randn({3, 100, 24});
  const lockstep::IntraOpThreads one(1);
  const Tensor all = both(qkv);
  EXPECT_TRUE(both(qkv.narrow(0, 1, 1)).equal(all.narrow(0, 1, 1)));
  const lockstep::IntraOpThreads two(2);
  if (lockstep::has_micro_kernel()) EXPECT_TRUE(both(qkv).equal(all));
}

TEST(CausalAttention, HasASecondDerivative) {
  if (!lockstep::has_micro_kernel()) GTEST_SKIP() << "LibTorch's attention has none on CPUs";
  torch::manual_seed(5);
  const Tensor start = torch::randn({2, 9, 12});
  const auto second = [&](const auto& attention) {
    const Tensor qkv = start.detach().requires_grad_();
    const Tensor first =
        torch::autograd::grad({attention(qkv, 2).sin().sum()}, {qkv}, {}, {}, /*create_graph=*/true)[0];
    return torch::autograd::grad({first.square().sum()}, {qkv})[0];
  };
  expect_alike(second([](auto& x, int64_t n) { return causal_attention(x, n); }),
               second([](auto& x, int64_t n) { return plain_attention(x, n); }));
}

}  // namespace causal_attention_test
