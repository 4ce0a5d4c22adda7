// Labels: 3x3 2x4
// Programs as users write them, whose modules know nothing of lockstep: each trained by plain LibTorch on whole batches
// and by DataParallel over 1 to 4 ranks, in float64.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/data/data.hpp>
#include <lockstep/data_parallel/convert_sync_batchnorm.hpp>
#include <lockstep/data_parallel/data_parallel.hpp>
#include <lockstep/data_parallel/sync_batch_norm.hpp>

#include "support/group_tests.hpp"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <vector>

namespace lockstep {
namespace foreign_programs_test {

using torch::Tensor;
namespace F = torch::nn::functional;
namespace nn = torch::nn;

constexpr double kTolerance = 1e-10;
constexpr int64_t kWords = 13, kTokens = 6, kWidth = 8, kHeads = 2;

// ---- The programs' modules.

struct BlockImpl : nn::Module {
  BlockImpl() {
    first_norm = register_module("first_norm", nn::LayerNorm(nn::LayerNormOptions({kWidth})));
    attention = register_module("attention", nn::Linear(nn::LinearOptions(kWidth, 3 * kWidth).bias(false)));
    together = register_module("together", nn::Linear(kWidth, kWidth));
    second_norm = register_module("second_norm", nn::LayerNorm(nn::LayerNormOptions({kWidth})));
    wide = register_module("wide", nn::Linear(kWidth, 4 * kWidth));
    narrow = register_module("narrow", nn::Linear(4 * kWidth, kWidth));
  }

  Tensor forward(const Tensor& x) {
    const auto parts = attention(first_norm(x)).view({x.size(0), x.size(1), 3, kHeads, -1}).permute({2, 0, 3, 1, 4});
    const Tensor scores = parts[0].matmul(parts[1].transpose(-2, -1)) / std::sqrt(kWidth / kHeads);
    const Tensor later = torch::ones({x.size(1), x.size(1)}, x.options().dtype(torch::kBool)).triu(1);
    const Tensor seen = scores.masked_fill(later, -std::numeric_limits<double>::infinity()).softmax(-1);
    const Tensor y = x + together(seen.matmul(parts[2]).transpose(1, 2).reshape(x.sizes()));
    return y + narrow(torch::gelu(wide(second_norm(y))));
  }

  nn::LayerNorm first_norm{nullptr}, second_norm{nullptr};
  nn::Linear attention{nullptr}, together{nullptr}, wide{nullptr}, narrow{nullptr};
};
TORCH_MODULE(Block);

// Its last layer's weight is that of the embedding.
struct Gpt : nn::Module {
  Gpt() {
    words = register_module("words", nn::Embedding(kWords, kWidth));
    places = register_module("places", nn::Embedding(kTokens, kWidth));
    blocks = register_module("blocks", nn::Sequential(Block(), Block()));
    norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({kWidth})));
    to(torch::kDouble);
  }

  Tensor forward(const Tensor& tokens) {
    const Tensor x = words(tokens) + places(torch::arange(tokens.size(1), tokens.options()));
    return F::linear(norm(blocks->forward(x)), words->weight);
  }

  nn::Embedding words{nullptr}, places{nullptr};
  nn::Sequential blocks{nullptr};
  nn::LayerNorm norm{nullptr};
};

// AdamW as users set it up: weight decay for matrices alone.
torch::optim::AdamW adamw(nn::Module& net) {
  std::vector<Tensor> matrices, others;
  for (const auto& parameter : net.parameters()) (parameter.dim() > 1 ? matrices : others).push_back(parameter);
  using torch::optim::AdamWOptions;
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(matrices, std::make_unique<AdamWOptions>(AdamWOptions(0.01).weight_decay(0.1)));
  groups.emplace_back(others, std::make_unique<AdamWOptions>(AdamWOptions(0.02).weight_decay(0)));
  return torch::optim::AdamW(std::move(groups), AdamWOptions(0.01));
}

// ---- What they have in common.

void copy_values(const nn::Module& from, nn::Module& to) {
  const torch::NoGradGuard no_grad;
  const auto copy = [](auto sources, auto targets) {
    for (size_t i = 0; i < sources.size(); ++i) targets[i].copy_(sources[i]);
  };
  copy(from.parameters(), to.parameters());
  copy(from.buffers(), to.buffers());
}

// Equal modules, for one device and for each rank; made here, since ranks would draw from one generator at once.
template <class Make>
auto copies_of(const Make& make, int ranks) {
  std::vector<decltype(make())> modules;
  for (int i = 0; i <= ranks; ++i) {
    modules.push_back(make());
    copy_values(*modules[0], *modules.back());
  }
  return modules;
}

void expect_same(const nn::Module& net, const nn::Module& alone) {
  for (const auto& [mine, theirs] : {std::pair{net.named_parameters(), alone.named_parameters()},
                                     std::pair{net.named_buffers(), alone.named_buffers()}}) {
    ASSERT_EQ(mine.keys(), theirs.keys());
    for (const auto& item : theirs) expect_near(mine[item.key()], item.value(), kTolerance, item.key());
  }
}

Tensor token_loss(const Tensor& logits, const Tensor& y) {
  return F::cross_entropy(logits.flatten(0, 1), y.flatten());
}

// Two batches of 50 sequences and one of 20. What comes next is what the loss asks for.
Dataset sequences() {
  const Tensor tokens = torch::randint(kWords, {120, kTokens + 1});
  return {tokens.narrow(1, 0, kTokens), tokens.narrow(1, 1, kTokens)};
}

using ForeignProgramsWorlds = Worlds;
INSTANTIATE_TEST_SUITE_P(Sizes, ForeignProgramsWorlds, testing::Values(1, 2, 3, 4),
                         [](const auto& info) { return std::to_string(info.param) + "Ranks"; });

// ---- The programs.

// With groups of parameters, accumulation, and LibTorch's clipping of what DataParallel has averaged.
TEST_P(ForeignProgramsWorlds, AGptWithTiedWeightsTrainsAsOnOneDevice) {
  const auto data = sequences();
  const auto nets = copies_of([] { return std::make_shared<Gpt>(); }, GetParam());
  const double max_norm = 0.5;
  std::vector<double> norms;

  auto alone = nets[0];
  auto optimizer = adamw(*alone);
  for (int epoch = 0; epoch < 2; ++epoch) {
    for (auto& batch : batches(data, {.size = 50, .seed = 3, .epoch = epoch})) {
      optimizer.zero_grad();
      token_loss(alone->forward(batch.x), batch.y).backward();
      norms.push_back(nn::utils::clip_grad_norm_(alone->parameters(), max_norm));
      optimizer.step();
    }
  }
  EXPECT_GT(*std::min_element(norms.begin(), norms.end()), max_norm);  // or it would not be clipped

  on_ranks([&](Rank& rank) {
    DataParallel net(nets[static_cast<size_t>(rank.index()) + 1], rank);
    auto adam = adamw(*net);
    size_t step = 0;
    for (int epoch = 0; epoch < 2; ++epoch) {
      for (auto& batch : batches(data, {.size = 50, .seed = 3, .epoch = epoch}, rank)) {
        adam.zero_grad();
        const auto x = batch.x.tensor_split(3), y = batch.y.tensor_split(3);
        for (size_t i = 0; i < x.size(); ++i) {
          std::optional<NoSync> more_to_come;
          if (i + 1 < x.size()) more_to_come.emplace(net.replica());
          net.loss({.x = x[i], .y = y[i], .global_size = batch.global_size}, token_loss).backward();
        }
        EXPECT_NEAR(nn::utils::clip_grad_norm_(net->parameters(), max_norm), norms[step++], kTolerance);
        adam.step();
      }
    }
    expect_same(*net, *alone);
  });
}

// Sequences end where they like: the loss is the mean over the tokens that count, of which each rank has another
// number.
TEST_P(ForeignProgramsWorlds, TokensOfUnevenSequencesCountEqually) {
  auto data = sequences();
  const Tensor lengths = torch::randint(1, kTokens + 1, {data.size(), 1});
  data.y = data.y.masked_fill(torch::arange(kTokens) >= lengths, -100);  // cross_entropy leaves out these
  const auto nets = copies_of([] { return std::make_shared<Gpt>(); }, GetParam());

  auto alone = nets[0];
  torch::optim::SGD optimizer(alone->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  for (auto& batch : batches(data, {.size = 50})) {
    optimizer.zero_grad();
    token_loss(alone->forward(batch.x), batch.y).backward();
    optimizer.step();
  }

  on_ranks([&](Rank& rank) {
    DataParallel net(nets[static_cast<size_t>(rank.index()) + 1], rank);
    torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    for (auto& batch : batches(data, {.size = 50}, rank)) {
      sgd.zero_grad();
      const Tensor here = batch.y.ne(-100).sum();
      const Tensor everywhere = here.clone();
      rank.allreduce(everywhere);
      net.mean(token_loss(net(batch.x), batch.y), here.item<int64_t>(), everywhere.item<int64_t>()).backward();
      sgd.step();
    }
    expect_same(*net, *alone);
  });
}

// The last batch has fewer samples than there are ranks.
TEST_P(ForeignProgramsWorlds, BatchNormTrainsAsOnOneDevice) {
  const auto make = [] {
    auto net = std::make_shared<nn::SequentialImpl>(
        nn::Conv2d(nn::Conv2dOptions(1, 4, 3).bias(false)), nn::BatchNorm2d(4), nn::ReLU(), nn::Flatten(),
        nn::Linear(4 * 4 * 4, 6), nn::BatchNorm1d(6), nn::Tanh(), nn::Linear(6, 3));
    net->to(torch::kDouble);
    return net;
  };
  const Dataset data = {torch::randn({20, 1, 6, 6}, torch::kDouble), torch::randint(3, {20})};
  const auto nets = copies_of(make, GetParam());
  const auto train = [&](nn::SequentialImpl& net, const Batches::Partner& shard,
                         const std::function<void(Batch&)>& backward) {
    torch::optim::SGD sgd(net.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9).weight_decay(0.01));
    for (int epoch = 0; epoch < 3; ++epoch) {
      for (auto& batch : batches(data, {.size = 9, .epoch = epoch}, shard)) {
        sgd.zero_grad();
        backward(batch);
        sgd.step();
      }
    }
  };
  auto alone = nets[0];
  train(*alone, {}, [&](Batch& batch) { F::cross_entropy(alone->forward(batch.x), batch.y).backward(); });
  alone->eval();

  on_ranks([&](Rank& rank) {
    const auto& mine = nets[static_cast<size_t>(rank.index()) + 1];
    EXPECT_EQ(convert_sync_batchnorm(*mine, rank), 2);
    DataParallel net(mine, rank);
    train(*net, rank, [&](Batch& batch) { net.loss(batch, F::cross_entropy).backward(); });
    expect_same(*net, *alone);
    net->eval();
    expect_near(net(data.x.to(rank.device())), alone->forward(data.x), kTolerance, "evaluated");
  });
}

}  // namespace foreign_programs_test
}  // namespace lockstep
