// Labels: concurrency arithmetic
// A transformer split by channels, and its layers alone, over 1 to 3 CPU ranks, against LibTorch's whole ones.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/nn/sample_scope.hpp>
#include <lockstep/tensor_parallel/parallel_transformer.hpp>

#include "nn/random_layers.hpp"
#include "support/error_of.hpp"
#include "support/group_tests.hpp"
#include "support/sharded_training.hpp"

#include <limits>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

namespace lockstep {
namespace parallel_transformer_test {

using torch::Tensor;
using torch::nn::Sequential;
namespace F = torch::nn::functional;
namespace nn = torch::nn;

using TransformerWorlds = Worlds;
INSTANTIATE_TEST_SUITE_P(Sizes, TransformerWorlds, testing::Values(1, 2, 3),
                         [](const auto& info) { return std::to_string(info.param) + "Ranks"; });

constexpr int64_t kWords = 11, kWidth = 12, kHeads = 6;

// A decoder's block, whole or in slices: attention to what came before, and two linear layers.
template <class Attention, class Up, class Down>
struct BlockParts {
  nn::LayerNorm norm1{nullptr}, norm2{nullptr};
  Attention attention{nullptr};
  Up up{nullptr};
  Down down{nullptr};

  Tensor compute(const Tensor& x) {  // [n, length, width]
    const Tensor y = norm1(x).transpose(0, 1);
    const Tensor later = torch::full({x.size(1), x.size(1)}, -std::numeric_limits<double>::infinity(), x.options());
    const auto attended = attention->forward(y, y, y, {}, /*need_weights=*/false, later.triu(1));
    const Tensor z = x + std::get<0>(attended).transpose(0, 1);
    return z + down(torch::gelu(up(norm2(z))));
  }
};

struct BlockInSlices : nn::Module, BlockParts<ParallelMultiheadAttention, ColumnParallelLinear, RowParallelLinear> {
  template <class Whole>
  BlockInSlices(const Whole& whole, Rank& rank) {
    norm1 = register_module("norm1", whole_copy(whole.norm1, rank));
    norm2 = register_module("norm2", whole_copy(whole.norm2, rank));
    attention = register_module("attention", ParallelMultiheadAttention(whole.attention, rank));
    up = register_module("up", ColumnParallelLinear(whole.up, rank));
    down = register_module("down", RowParallelLinear(whole.down, rank));
  }
  Tensor forward(const Tensor& x) { return compute(x); }
};

struct BlockImpl : nn::Cloneable<BlockImpl>, Shardable, BlockParts<nn::MultiheadAttention, nn::Linear, nn::Linear> {
  BlockImpl() { BlockImpl::reset(); }
  void reset() override {
    norm1 = register_module("norm1", nn::LayerNorm(nn::LayerNormOptions({kWidth})));
    norm2 = register_module("norm2", nn::LayerNorm(nn::LayerNormOptions({kWidth})));
    attention = register_module("attention", nn::MultiheadAttention(kWidth, kHeads));
    up = register_module("up", nn::Linear(kWidth, 17));
    down = register_module("down", nn::Linear(17, kWidth));
  }
  Tensor forward(const Tensor& x) { return compute(x); }
  nn::AnyModule shard(Rank& rank) const override { return nn::AnyModule(std::make_shared<BlockInSlices>(*this, rank)); }
};
TORCH_MODULE(Block);

// Values that differ from their first ones, of which norms' are ones and zeros.
void scatter(Sequential& net) {
  const torch::NoGradGuard no_grad;
  net->to(torch::kDouble);
  for (const auto& parameter : net->parameters()) parameter.add_(torch::randn_like(parameter) * 0.1);
}

Sequential transformer() {
  Sequential net({{"words", nn::AnyModule(nn::Embedding(nn::EmbeddingOptions(kWords, kWidth).padding_idx(3)))},
                  {"block1", nn::AnyModule(Block())},
                  {"block2", nn::AnyModule(Block())},
                  {"norm", nn::AnyModule(nn::LayerNorm(nn::LayerNormOptions({kWidth})))},
                  {"output", nn::AnyModule(nn::Linear(kWidth, kWords))}});
  scatter(net);
  return net;
}

Tensor loss_of(const Tensor& logits, const Tensor& words) {
  return F::cross_entropy(logits.flatten(0, 1), words.flatten());
}

bool frozen(const std::string& name) {
  return name == "block1.norm1.weight" || name == "block2.attention.in_proj_bias" || name == "norm.bias";
}

void freeze_some(const Sequential& net) {
  for (const auto& item : net->named_parameters()) item.value().requires_grad_(!frozen(item.key()));
}

TEST_P(TransformerWorlds, ATransformerTrainsAsOnOneDevice) {
  const Sequential net = transformer();
  freeze_some(net);
  const Tensor words = torch::randint(kWords, {4, 6}), next = torch::randint(kWords, {4, 6});
  Sequential whole = copy_of(net);
  freeze_some(whole);  // a clone forgets what is frozen
  std::vector<Tensor> results;
  torch::optim::SGD sgd(whole->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  for (int step = 0; step < 3; ++step) {
    sgd.zero_grad();
    results.push_back(whole->forward(words));
    loss_of(results.back(), next).backward();
    sgd.step();
  }
  on_ranks([&](Rank& rank) {
    Sequential part = shard(net, rank), joined = copy_of(net);
    torch::optim::SGD own(part->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    for (const Tensor& expected : results) {
      own.zero_grad();
      const Tensor result = part->forward(words.to(rank.device()));
      expect_near(result.detach(), expected.detach(), kTolerance, "result");
      loss_of(result, next.to(rank.device())).backward();
      own.step();
    }
    expect_whole_parameters_equal_on_all_ranks(part, rank);
    joined->to(rank.device());
    unshard(part, rank, joined);
    const auto weights = whole->named_parameters();
    for (const auto& item : joined->named_parameters()) {
      expect_near(item.value().detach(), weights[item.key()].detach(), kTolerance, item.key());
    }
    const auto split = part->named_parameters();
    for (const auto& item : split) EXPECT_EQ(item.value().requires_grad(), !frozen(item.key())) << item.key();
    const int64_t ranks = rank.world_size();
    EXPECT_EQ(split["block1.attention.in_proj_weight"].sizes(), at::IntArrayRef({3 * kWidth / ranks, kWidth}));
    EXPECT_EQ(split["block1.attention.out_proj.weight"].sizes(), at::IntArrayRef({kWidth, kWidth / ranks}));
  });
}

// Between slices: a LayerNorm of features and a GroupNorm of channels, with and without weights; gathered where they
// must be.
TEST_P(TransformerWorlds, NormsTakeSlices) {
  Sequential features({{"fc1", nn::Linear(7, kWidth)},
                       {"norm", nn::LayerNorm(nn::LayerNormOptions({kWidth}).eps(0.1))},
                       {"tanh", nn::Tanh()},
                       {"plain", nn::LayerNorm(nn::LayerNormOptions({kWidth}).elementwise_affine(false))},
                       {"fc2", nn::Linear(kWidth, 5)}});
  Sequential channels({{"conv", nn::Conv2d(2, 12, 3)},
                       {"norm", nn::GroupNorm(nn::GroupNormOptions(6, 12).eps(0.1))},
                       {"tanh", nn::Tanh()},
                       {"of_all", nn::GroupNorm(nn::GroupNormOptions(1, 12))},
                       {"conv2", nn::Conv2d(12, 12, 2)},
                       {"of_image", nn::LayerNorm(nn::LayerNormOptions({12, 2, 2}))},
                       {"flatten", nn::Flatten()},
                       {"fc", nn::Linear(12 * 2 * 2, 5)}});
  scatter(features);
  scatter(channels);
  expect_sharded_trains_as_whole(features, {7}, 5, GetParam());
  expect_sharded_trains_as_whole(channels, {2, 5, 5}, 5, GetParam());
  run(test_devices(GetParam()), [&](Rank& rank) {
    const auto norm = shard(features, rank)->named_parameters()["norm.weight"];
    EXPECT_EQ(norm.size(0), kWidth / rank.world_size());
    EXPECT_EQ(shard(channels, rank)->named_parameters()["norm.bias"].size(0), 12 / rank.world_size());
  });
}

TEST_P(TransformerWorlds, AnEmbeddingSplitByItsVocabularyIsTheWholeOne) {
  nn::Embedding whole(nn::EmbeddingOptions(kWords, kWidth).padding_idx(3));
  whole->to(torch::kDouble);
  const Tensor words = torch::randint(kWords, {4, 6}), expected = whole(words);
  const Tensor gradient = torch::sin(expected.detach() * 3);
  expected.backward(gradient);
  on_ranks([&](Rank& rank) {
    VocabularyParallelEmbedding part(whole, rank);
    const Tensor found = part(words.to(rank.device()));
    expect_near(found.detach(), expected.detach(), kTolerance, "result");
    found.backward(gradient.to(rank.device()));
    expect_near(part->weight.grad(), slice_of(whole->weight.grad(), 0, rank), kTolerance, "gradient");
  });
}

struct Attended {
  Tensor y, weights;
  std::vector<Tensor> gradients;  // gradients of query, key and value, then of the parameters
};

struct AttentionInputs {
  Tensor query, key, value, key_padding_mask, attn_mask;
};

// `net` is an attention alone, whole or in slices.
Attended attend(Sequential& net, const AttentionInputs& in, bool average, const c10::Device& device) {
  const auto leaf_of = [&](const Tensor& tensor) { return tensor.detach().to(device).clone().requires_grad_(); };
  const Tensor query = leaf_of(in.query), key = leaf_of(in.key), value = leaf_of(in.value);
  const auto [y, weights] = net->forward<std::tuple<Tensor, Tensor>>(query, key, value, in.key_padding_mask.to(device),
                                                                     true, in.attn_mask.to(device), average);
  (torch::sin(y * 3).sum() + torch::cos(weights * 5).sum()).backward();
  return {y.detach(), weights.detach(), {query.grad(), key.grad(), value.grad()}};
}

TEST_P(TransformerWorlds, AttentionIsTheWholeOne) {
  const int64_t length = 4, source = 5, n = 3;
  const auto doubles = [](at::IntArrayRef sizes) { return torch::randn(sizes, torch::kDouble); };
  Tensor left_out = torch::zeros({n, source}, torch::kBool);
  left_out[1][4] = true;
  for (const bool bias : {true, false}) {
    for (const bool other_sizes : {true, false}) {
      auto options = nn::MultiheadAttentionOptions(kWidth, kHeads).bias(bias);
      if (other_sizes) options.kdim(7).vdim(7);
      const int64_t width = other_sizes ? 7 : kWidth;
      const AttentionInputs in{doubles({length, n, kWidth}), doubles({source, n, width}), doubles({source, n, width}),
                               left_out, doubles({length, source})};
      Sequential net({{"attention", nn::AnyModule(nn::MultiheadAttention(options))}});
      scatter(net);
      for (const bool average : {true, false}) {
        Sequential whole = copy_of(net);
        const Attended expected = attend(whole, in, average, c10::kCPU);
        on_ranks([&](Rank& rank) {
          Sequential part = shard(net, rank), joined = copy_of(net);
          const Attended found = attend(part, in, average, rank.device());
          expect_near(found.y, expected.y, kTolerance, "y");
          expect_near(found.weights, expected.weights, kTolerance, "weights");
          for (size_t i = 0; i < 3; ++i) {
            expect_near(found.gradients[i], expected.gradients[i], kTolerance, "gradient " + std::to_string(i));
          }
          joined->to(rank.device());
          unshard_gradients(part, rank, joined);
          const auto wholes = whole->named_parameters();
          for (const auto& item : joined->named_parameters()) {
            expect_near(item.value().grad(), wholes[item.key()].grad(), kTolerance, item.key());
          }
        });
      }
    }
  }
}

TEST_P(TransformerWorlds, AttentionDropsTheSameOnAnyNumberOfRanks) {
  Sequential net({{"attention",
                   nn::AnyModule(nn::MultiheadAttention(nn::MultiheadAttentionOptions(kWidth, kHeads).dropout(0.4)))}});
  scatter(net);
  const Tensor x = torch::randn({5, 3, kWidth}, torch::kDouble);
  const auto dropped = [&](Rank& rank) {
    Sequential part = shard(net, rank);
    name_dropouts(*part);
    const SampleScope scope({.seed = 5, .step = 1, .first = 0, .size = 3});
    const Tensor here = x.to(rank.device());
    const auto attended = part->forward<std::tuple<Tensor, Tensor>>(here, here, here, Tensor(), true, Tensor(), false);
    return std::get<1>(attended).detach().cpu();  // weights of each head
  };
  Tensor alone;
  run(test_devices(1), [&](Rank& rank) { alone = dropped(rank); });
  EXPECT_GT((alone == 0).sum().item<int64_t>(), 0);
  on_ranks([&](Rank& rank) { expect_near(dropped(rank), alone, kTolerance, "weights"); });
}

TEST(ParallelTransformer, WhatCannotBeSplitIsAnError) {
  const auto error_with = [](const Sequential& net) {
    return error_on_ranks(2, [&](Rank& rank) { shard(net, rank); });
  };
  const auto attention = [](const nn::MultiheadAttentionOptions& options) {
    return Sequential({{"attention", nn::AnyModule(nn::MultiheadAttention(options))}});
  };
  EXPECT_THAT(error_with(attention(nn::MultiheadAttentionOptions(6, 3))), Refused());
  EXPECT_THAT(error_with(attention(nn::MultiheadAttentionOptions(6, 2).add_bias_kv(true))), Refused());
  EXPECT_THAT(error_with(Sequential({{"fc", nn::AnyModule(nn::Linear(4, 4))},
                                     {"attention", nn::AnyModule(nn::MultiheadAttention(4, 2))}})),
              Refused());
  const auto words = [](const nn::EmbeddingOptions& options) {
    return Sequential({{"words", nn::AnyModule(nn::Embedding(options))}});
  };
  EXPECT_THAT(error_with(words(nn::EmbeddingOptions(4, 4).max_norm(1.0))), Refused());
  EXPECT_THAT(error_on_ranks(2,
                             [](Rank& rank) {
                               VocabularyParallelEmbedding(
                                   nn::Embedding(nn::EmbeddingOptions(4, 4).scale_grad_by_freq(true)), rank);
                             }),
              Refused());
  EXPECT_THAT(error_on_ranks(2,
                             [](Rank& rank) {
                               VocabularyParallelEmbedding words(nn::Embedding(4, 4), rank);
                               words(torch::tensor({0, 4}));
                             }),
              Refused());
}

}  // namespace parallel_transformer_test
}  // namespace lockstep
