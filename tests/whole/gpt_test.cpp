// Labels: concurrency arithmetic 3x3 2x4
// Gpt: against a decoder in plain LibTorch, over every split and ZeRO stage; and as `train()` trains it on a text.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/data_parallel/optimizer.hpp>
#include <lockstep/lab/optimizers.hpp>
#include <lockstep/models/gpt.hpp>
#include <lockstep/nn/tensor_files.hpp>
#include <lockstep/nn/weights.hpp>
#include <lockstep/split/split_model.hpp>
#include <lockstep/trainer/trainer.hpp>

#include "support/error_of.hpp"
#include "support/group_tests.hpp"
#include "support/scratch_folder.hpp"
#include "support/test_devices.hpp"

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

namespace lockstep {
namespace gpt_test {

using torch::Tensor;
namespace F = torch::nn::functional;
namespace nn = torch::nn;

constexpr double kTolerance = 1e-10;
constexpr int64_t kWords = 13, kWidth = 8, kHeads = 4, kContext = 6;
const GptOptions kSmall{
    .vocabulary = kWords, .layers = 2, .heads = kHeads, .embedding = kWidth, .context = kContext, .seed = 5};

Gpt small_gpt() {
  Gpt net(kSmall);
  net->to(torch::kDouble);
  return net;
}

// ---- The same network without lockstep: LibTorch's layers, and attention as in the paper.

struct PlainGpt {
  explicit PlainGpt(const nn::Module& like) {
    for (const auto& item : like.named_parameters()) {
      weights[item.key()] = item.value().detach().clone().requires_grad_();
      parameters.push_back(weights[item.key()]);
    }
  }

  Tensor norm(const Tensor& x, const std::string& name) {
    return F::layer_norm(
        x, F::LayerNormFuncOptions({kWidth}).weight(weights[name + ".weight"]).bias(weights[name + ".bias"]));
  }
  Tensor linear(const Tensor& x, const std::string& name) {
    return F::linear(x, weights[name + ".weight"], weights[name + ".bias"]);
  }

  Tensor attention(const Tensor& x, const std::string& block) {
    const auto parts = linear(x, block + "qkv").chunk(3, -1);
    const auto in_heads = [](const Tensor& y) { return y.view({y.size(0), y.size(1), kHeads, -1}).transpose(1, 2); };
    const Tensor scores = in_heads(parts[0]).matmul(in_heads(parts[1]).transpose(-2, -1)) / std::sqrt(kWidth / kHeads);
    const Tensor later = torch::ones({x.size(1), x.size(1)}, torch::kBool).triu(1);
    const Tensor seen = scores.masked_fill(later, -std::numeric_limits<double>::infinity()).softmax(-1);
    return linear(seen.matmul(in_heads(parts[2])).transpose(1, 2).reshape(x.sizes()), block + "projection");
  }

  Tensor forward(const Tensor& tokens) {
    const Tensor words = weights["embedding.tokens.weight"];
    Tensor x = F::embedding(tokens, words) + weights["embedding.positions.weight"].slice(0, 0, tokens.size(1));
    for (const std::string block : {"block1.", "block2."}) {
      x = x + attention(norm(x, block + "norm1"), block);
      x = x + linear(torch::gelu(linear(norm(x, block + "norm2"), block + "up")), block + "down");
    }
    return F::linear(norm(x, "norm"), words);
  }

  std::map<std::string, Tensor> weights;
  std::vector<Tensor> parameters;
};

Tensor plain_loss(const Tensor& logits, const Tensor& y) {
  return F::cross_entropy(logits.flatten(0, 1), y.flatten());
}

// Three batches, of 10, 10 and 4 sequences. For so few ranks as tests have, the last parts are of one sequence.
Dataset sequences() {
  const Tensor tokens = (torch::arange(24 * (kContext + 1)) * 7919 % 1009 % kWords).view({24, kContext + 1});
  return {tokens.narrow(1, 0, kContext), tokens.narrow(1, 1, kContext)};
}

constexpr BatchOptions kBatches{.size = 10, .seed = 3};

const auto kSgd = torch::optim::SGDOptions(0.3).momentum(0.9).weight_decay(0.01);

// Gives what one device learns.
PlainGpt trained_alone() {
  PlainGpt alone(*small_gpt());
  torch::optim::SGD sgd(alone.parameters, kSgd);
  for (auto& batch : batches(sequences(), kBatches)) {
    sgd.zero_grad();
    plain_loss(alone.forward(batch.x), batch.y).backward();
    sgd.step();
  }
  return alone;
}

void expect_weights(const nn::Module& net, PlainGpt& alone) {
  const auto parameters = net.named_parameters();
  ASSERT_EQ(parameters.size(), alone.weights.size());
  for (const auto& item : parameters) expect_near(item.value(), alone.weights[item.key()], kTolerance, item.key());
}

// ---- The module.

TEST(GptTest, ComputesWhatLibTorchsLayersCompute) {
  auto net = small_gpt();
  PlainGpt plain(*net);
  const auto data = sequences();
  for (const int64_t length : {int64_t{1}, int64_t{4}, kContext}) {
    const Tensor x = data.x.narrow(1, 0, length), y = data.y.narrow(1, 0, length);
    const Tensor logits = net->forward(x), expected = plain.forward(x);
    expect_near(logits, expected, kTolerance, "logits");
    net->zero_grad();
    for (auto& parameter : plain.parameters) parameter.mutable_grad() = Tensor();
    token_cross_entropy(logits, y).backward();
    plain_loss(expected, y).backward();
    for (const auto& item : net->named_parameters()) {
      expect_near(item.value().grad(), plain.weights[item.key()].grad(), kTolerance, item.key() + ".grad");
    }
  }
}

TEST(GptTest, HasItsWordsOnceAndItsSeedsWeights) {
  int64_t parameters = 0;
  const Gpt gpt;
  for (const auto& parameter : gpt->parameters()) parameters += parameter.numel();
  EXPECT_EQ(parameters, 842'496);
  EXPECT_NEAR(gpt->named_parameters()["block1.up.weight"].std().item<double>(), 0.02, 0.001);
  EXPECT_NEAR(gpt->named_parameters()["block1.down.weight"].std().item<double>(), 0.02 / std::sqrt(8), 0.001);
  EXPECT_EQ(weights_hash(*Gpt(GptOptions{.seed = 3})), weights_hash(*Gpt(GptOptions{.seed = 3})));
  EXPECT_NE(weights_hash(*Gpt(GptOptions{.seed = 3})), weights_hash(*gpt));
}

TEST(GptTest, AClonesHeadHasTheClonesWords) {
  auto net = small_gpt();
  const auto copy = std::dynamic_pointer_cast<nn::SequentialImpl>(net->clone());
  const auto data = sequences();
  EXPECT_TRUE(torch::equal(copy->forward(data.x), net->forward(data.x)));
  {
    const torch::NoGradGuard no_grad;
    copy->named_parameters()["embedding.tokens.weight"].mul_(2);
  }
  PlainGpt plain(*copy);
  expect_near(copy->forward(data.x), plain.forward(data.x), kTolerance, "logits");
}

TEST(GptTest, RefusesSizesThatDoNotFit) {
  const auto error = [](GptOptions options) { return error_of([&] { Gpt gpt(options); }); };
  EXPECT_THAT(error({.layers = 0}), Refused());
  EXPECT_THAT(error({.context = 0}), Refused());
  EXPECT_THAT(error({.heads = 3}), Refused());
  EXPECT_THAT(error({.embedding = int64_t{1} << 40}), Refused());
  for (const double p : {-0.1, 1.0, std::nan("")}) {
    EXPECT_THAT(error({.dropout = p}), Refused());
  }
  auto net = small_gpt();
  for (const Tensor& x :
       {torch::zeros({2, kContext + 1}, torch::kLong), torch::zeros({2, 3}), torch::zeros({3}, torch::kLong)}) {
    EXPECT_THAT(error_of([&] { net->forward(x); }), Refused());
  }
}

// ---- On several ranks.

using GptWorlds = Worlds;
INSTANTIATE_TEST_SUITE_P(Sizes, GptWorlds, testing::Values(1, 2, 3, 4),
                         [](const auto& info) { return std::to_string(info.param) + "Ranks"; });

void expect_trains_alike(Rank& rank, const ModelSplit& split, PlainGpt& alone) {
  SCOPED_TRACE(to_string(split));
  SplitModel net(nn::Sequential(std::shared_ptr<nn::SequentialImpl>(small_gpt().ptr())), rank, split);
  Optimizer sgd(net, kSgd);
  for (auto& batch : batches(sequences(), kBatches, net.mesh().data())) {
    sgd.zero_grad();
    net.loss(batch, token_cross_entropy).backward();
    sgd.step();
  }
  nn::Sequential whole(std::shared_ptr<nn::SequentialImpl>(small_gpt().ptr()));
  net.gather(whole);
  expect_weights(*whole, alone);
  const Tensor x = sequences().x.narrow(0, 0, 3).to(rank.device());
  expect_near(net.forward(x), alone.forward(sequences().x.narrow(0, 0, 3)).detach(), kTolerance, "logits");
}

TEST_P(GptWorlds, EveryMeshTrainsLikeOneDevice) {
  auto alone = trained_alone();
  on_ranks([&](Rank& rank) {
    for (const auto& mesh : mesh_shapes(rank.world_size())) {
      if (kHeads % mesh.tensor != 0) continue;
      expect_trains_alike(rank, {.mesh = mesh}, alone);
      if (mesh.pipeline == 1) continue;
      expect_trains_alike(rank, {.mesh = mesh, .microbatches = 3, .recompute = true}, alone);
      if (2 * mesh.pipeline > 5) continue;
      expect_trains_alike(
          rank, {.mesh = mesh, .schedule = PipelineSchedule::interleaved, .stages_per_rank = 2, .microbatches = 2},
          alone);
    }
  });
}

TEST_P(GptWorlds, EveryStageOfZeroTrainsLikeOneDevice) {
  auto alone = trained_alone();
  on_ranks([&](Rank& rank) {
    for (const int stage : {1, 2, 3}) {
      SCOPED_TRACE("stage " + std::to_string(stage));
      DataParallel net(small_gpt(), rank, {.sharded = static_cast<Sharded>(stage)});
      Optimizer sgd(net, kSgd);
      for (auto& batch : batches(sequences(), kBatches, rank)) {
        sgd.zero_grad();
        net.loss(batch, token_cross_entropy).backward();
        sgd.step();
      }
      const auto whole = net.whole();
      expect_weights(*net, alone);
    }
  });
}

TEST(GptTest, HeadsThatDoNotDivideAreRefusedWithTheNumbersThatFit) {
  const auto error = error_on_ranks(3, [](Rank& rank) {
    SplitModel net(nn::Sequential(std::shared_ptr<nn::SequentialImpl>(small_gpt().ptr())), rank,
                   {.mesh = {.tensor = 3}});
  });
  EXPECT_THAT(error, Refused());
}

// ---- On a text.

class GptOnText : public testing::Test {
 protected:
  GptOnText() {
    std::string text;
    for (int line = 0; line < 120; ++line)
      text += "the quick brown fox jumps over the lazy dog, and " + std::to_string(line % 7) + "\n";
    folder_.write("text", text);
  }

  TrainOptions options(int ranks = 1, const std::string& name = "") const {
    TrainOptions options;
    options.model = {.name = "gpt", .layers = 2, .heads = 2, .embedding = 16, .context = 12};
    options.data = TextFile{folder_ / "text"};
    options.devices = test_devices(ranks);
    options.batch.size = 64;
    options.optimizer.kind = OptimizerKind::adamw;
    options.rate.lr = 0.01;
    options.epochs = 2;
    if (!name.empty()) options.keep.run_dir = folder_ / name;
    return options;
  }

  static void expect_one(const TrainResult& result, const TrainResult& expected) {
    ASSERT_EQ(result.history.size(), expected.history.size());
    for (size_t i = 0; i < result.history.size(); ++i) {
      EXPECT_EQ(result.history[i].train_loss, expected.history[i].train_loss);
      EXPECT_EQ(result.history[i].test, expected.history[i].test);
      EXPECT_EQ(result.history[i].weights, expected.history[i].weights) << "epoch " << i + 1;
    }
  }

  const ScratchFolder folder_;
};

TEST_F(GptOnText, LearnsAndTellsItsPerplexity) {
  const auto result = train(options(2, "run"));
  ASSERT_EQ(result.history.size(), 2u);
  const auto &first = result.history[0], &last = result.history[1];
  for (const auto& epoch : result.history) {
    EXPECT_DOUBLE_EQ(epoch.test.at("perplexity"), std::exp(epoch.test.at("loss")));
    EXPECT_TRUE(std::isnan(epoch.train_accuracy) && std::isnan(epoch.test_accuracy));
  }
  EXPECT_LT(first.test.at("perplexity"), 200);  // 256 bytes that are equally likely have 256
  EXPECT_LT(last.test.at("perplexity"), 0.8 * first.test.at("perplexity"));
  const auto kept = read_metrics(folder_ / "run/metrics.jsonl");
  EXPECT_EQ(kept[1].test, last.test);

  const auto evaluated = evaluate_run(folder_ / "run", {.devices = test_devices(3)});
  EXPECT_FALSE(evaluated.counts_answers);
  EXPECT_NEAR(evaluated.perplexity, last.test.at("perplexity"), 1e-5);
  EXPECT_EQ(evaluated.weights, last.weights);
}

TEST_F(GptOnText, WithAGrainGivesTheSameBitsOnEveryLayout) {
  TrainOptions alone = options();
  alone.batch.grain = 8;
  alone.model.residual_dropout = 0.1;
  const auto expected = train(alone);
  const std::vector<std::pair<int, std::function<void(TrainOptions&)>>> layouts = {
      {2, [](auto&) {}},
      {3, [](auto& o) { o.way = Sharded::state; }},
      {2, [](auto& o) { o.way = Sharded::gradients; }},
      {2, [](auto& o) { o.batch.accumulate = 2; }},
      {2, [](auto& o) { o.way = SplitNetwork{{.mesh = {.pipeline = 2}}}; }},
      {3,
       [](auto& o) {
         o.way = SplitNetwork{{.mesh = {.pipeline = 3}, .schedule = PipelineSchedule::gpipe, .recompute = true}};
       }},
      {2,
       [](auto& o) {
         o.way =
             SplitNetwork{{.mesh = {.pipeline = 2}, .schedule = PipelineSchedule::interleaved, .stages_per_rank = 2}};
       }},
      {4, [](auto& o) { o.way = SplitNetwork{{.mesh = {.data = 2, .pipeline = 2}}}; }}};
  for (size_t i = 0; i < layouts.size(); ++i) {
    SCOPED_TRACE("layout " + std::to_string(i));
    TrainOptions settings = alone;
    settings.devices = test_devices(layouts[i].first);
    layouts[i].second(settings);
    expect_one(train(settings), expected);
  }
}

TEST_F(GptOnText, GoesOnToTheSameBits) {
  const auto expected = train(options(2, "whole"));
  auto settings = options(2, "first");
  settings.keep.checkpoints = {.last = 100, .every = 1};
  expect_one(train(settings), expected);
  settings.keep.resume = folder_ / "first/checkpoints/epoch-0000-step-000003.safetensors";
  settings.keep.run_dir = folder_ / "second";
  expect_one(train(settings), expected);
  settings.data = TextFile{folder_ / "other"};
  folder_.write("other", "T" + folder_.read("text").substr(1));
  settings.keep.run_dir = folder_ / "third";
  EXPECT_THAT(error_of([&] { train(settings); }), Fails(Error::file));
}

TEST_F(GptOnText, SplitsGiveTheSameLossUpToRounding) {
  const auto expected = train(options());
  for (const MeshShape mesh :
       {MeshShape{.tensor = 2}, MeshShape{.data = 2, .tensor = 2}, MeshShape{.pipeline = 2, .tensor = 2}}) {
    auto settings = options(mesh.size());
    settings.way = SplitNetwork{{.mesh = mesh}};
    const auto result = train(settings);
    EXPECT_NEAR(result.history[1].train_loss, expected.history[1].train_loss, 1e-3) << to_string(mesh);
  }
  auto zero = options(2);
  zero.way = Sharded::parameters;
  EXPECT_NEAR(train(zero).history[1].train_loss, expected.history[1].train_loss, 1e-3);
}

TEST_F(GptOnText, RefusesWhatDoesNotGoTogether) {
  const auto error = [&](const std::function<void(TrainOptions&)>& change) {
    auto settings = options();
    change(settings);
    return error_of([&] { train(settings); });
  };
  EXPECT_THAT(error([](auto& o) { o.data = TextFile{"/nowhere/text"}; }), Fails(Error::file));
  EXPECT_THAT(error([&](auto& o) { o.data = TextFile{folder_.path()}; }), Fails(Error::file));
  EXPECT_THAT(error([](auto& o) { o.model.context = 2000; }), Refused());
  EXPECT_THAT(error([](auto& o) { o.model.context = 0; }), Refused());
  EXPECT_THAT(error([](auto& o) { o.model.heads = 3; }), Refused());
  EXPECT_THAT(error([](auto& o) { o.model = {.name = "mlp", .layers = 3}; }), Refused());
  EXPECT_THAT(error([](auto& o) { o.model.width = 2; }), Refused());
  EXPECT_THAT(error([](auto& o) { o.model.dropout = 0.1; }), Refused());
}

}  // namespace gpt_test
}  // namespace lockstep
