// Labels: concurrency
// MeanOver: a mean over tokens, or over the weights of classes, is that of one device, however the batch is cut.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/data/data.hpp>
#include <lockstep/data_parallel/data_parallel.hpp>
#include <lockstep/data_parallel/optimizer.hpp>
#include <lockstep/nn/weights.hpp>
#include <lockstep/ranks/rank.hpp>

#include "support/error_of.hpp"
#include "support/test_devices.hpp"

#include <cmath>
#include <functional>
#include <string>
#include <vector>

namespace mean_over_test {

namespace F = torch::nn::functional;
namespace nn = torch::nn;
using lockstep::Batch;
using lockstep::Criterion;
using lockstep::DataParallel;
using lockstep::error_of;
using lockstep::MeanOver;
using lockstep::Rank;
using lockstep::Refused;
using testing::Each;

constexpr int64_t kPadding = 9, kSamples = 10, kLength = 6, kWords = 4;

// Sentences of 0 to 6 words. The first three have none, so that a rank or a part may have no word.
lockstep::Dataset sentences() {
  torch::manual_seed(1);
  torch::Tensor y = torch::randint(kWords, {kSamples, kLength});
  for (int64_t i = 0; i < kSamples; ++i) y[i].slice(0, i < 3 ? 0 : i - 3).fill_(kPadding);
  return {torch::randn({kSamples, kLength, 5}, torch::kDouble), y};
}

// LibTorch's own options, and the same by hand.
F::CrossEntropyFuncOptions weighted() {
  return F::CrossEntropyFuncOptions().ignore_index(kPadding).weight(
      torch::tensor({1.5, 0.25, 1.0, 0.7}, torch::kDouble));
}
torch::Tensor sum_of_words(const torch::Tensor& y_hat, const torch::Tensor& y) {
  return F::cross_entropy(y_hat.flatten(0, 1), y.flatten(),
                          F::CrossEntropyFuncOptions().ignore_index(kPadding).reduction(torch::kSum));
}
torch::Tensor words(const torch::Tensor& y) {
  return y.ne(kPadding).sum();
}

struct Net : nn::Module {  // logits [n, words, length], as cross_entropy takes them; or [n, length, words]
  explicit Net(bool words_last) : words_last(words_last) { to(torch::kDouble); }
  torch::Tensor forward(const torch::Tensor& x) {
    const auto logits = output(hidden(x).tanh());
    return words_last ? logits : logits.transpose(1, 2);
  }
  nn::Linear hidden = register_module("hidden", nn::Linear(5, 8)),
             output = register_module("output", nn::Linear(8, kWords));
  bool words_last;
};

std::shared_ptr<Net> net_of(bool words_last) {
  torch::manual_seed(2);
  return std::make_shared<Net>(words_last);
}

struct Way {
  bool words_last = true;
  Criterion criterion;
  std::function<torch::Tensor(const torch::Tensor&, const torch::Tensor&)> on_one_device;
};

std::vector<Way> ways() {
  return {{true, MeanOver(sum_of_words, words), [](auto& y_hat, auto& y) { return sum_of_words(y_hat, y) / words(y); }},
          {true,
           MeanOver([](const torch::Tensor& y_hat, const Batch& batch) { return sum_of_words(y_hat, batch.y); },
                    [](const Batch& batch) { return words(batch.y); }),
           [](auto& y_hat, auto& y) { return sum_of_words(y_hat, y) / words(y); }},
          {false, Criterion(F::cross_entropy, weighted()),
           [](auto& y_hat, auto& y) { return F::cross_entropy(y_hat, y, weighted()); }},
          {false, nn::CrossEntropyLoss(weighted()),
           [](auto& y_hat, auto& y) { return F::cross_entropy(y_hat, y, weighted()); }},
          {false, nn::CrossEntropyLoss(weighted().label_smoothing(0.1)),
           [](auto& y_hat, auto& y) { return F::cross_entropy(y_hat, y, weighted().label_smoothing(0.1)); }}};
}

constexpr int kSteps = 4;

std::vector<torch::Tensor> on_one_device(const Way& way) {
  const auto net = net_of(way.words_last);
  const auto data = sentences();
  torch::optim::SGD sgd(net->parameters(), 0.3);
  std::vector<torch::Tensor> result;
  for (int step = 0; step < kSteps; ++step) {
    sgd.zero_grad();
    const auto loss = way.on_one_device(net->forward(data.x), data.y);
    loss.backward();
    sgd.step();
    result.push_back(loss.detach());
  }
  for (const auto& parameter : net->parameters()) result.push_back(parameter.detach());
  return result;
}

std::vector<torch::Tensor> on_ranks(int ranks, const Way& way, int64_t grain, int parts,
                                    lockstep::Sharded sharded = {}) {
  std::vector<torch::Tensor> result;
  const auto data = sentences();
  lockstep::run(lockstep::test_devices(ranks), [&](Rank& rank) {
    DataParallel net(rank.in_turn([&] { return net_of(way.words_last); }), rank, {.sharded = sharded});
    lockstep::Optimizer sgd(net, torch::optim::SGDOptions(0.3));
    std::vector<torch::Tensor> losses;
    for (int step = 0; step < kSteps; ++step) {
      for (const auto& batch : lockstep::batches(data, {.size = kSamples, .shuffle = false, .grain = grain}, rank)) {
        sgd.zero_grad();
        double loss = 0;
        const auto all = batch.in_parts(parts);
        for (size_t part = 0; part < all.size(); ++part) {
          std::optional<lockstep::NoSync> later;
          if (part + 1 < all.size()) later.emplace(net.replica());
          lockstep::Loss of_part = net.loss(all[part], way.criterion);
          of_part.backward();
          loss += of_part.item() * static_cast<double>(all[part].size()) / kSamples;
        }
        const torch::Tensor whole = torch::full({}, loss, torch::kDouble);
        rank.allreduce(whole);
        losses.push_back(whole);
        sgd.step();
      }
    }
    const auto all = net.whole();
    if (rank.index() != 0) return;
    result = losses;
    for (const auto& parameter : net->parameters()) result.push_back(parameter.detach().clone());
  });
  return result;
}

MATCHER_P(IsNear, expected, "") {
  if (arg.size() != expected.size()) return false;
  for (size_t i = 0; i < arg.size(); ++i) {
    if (!arg[i].allclose(expected[i], 1e-13, 1e-14))
      return *result_listener << "number " << i << " is " << arg[i], false;
  }
  return true;
}

TEST(MeanOver, IsThatOfOneDeviceOnAnyNumberOfRanks) {
  for (size_t way = 0; way < ways().size(); ++way) {
    SCOPED_TRACE(way);
    const auto expected = on_one_device(ways()[way]);
    for (const int ranks : {1, 2, 3}) EXPECT_THAT(on_ranks(ranks, ways()[way], 0, 1), IsNear(expected)) << ranks;
  }
}

// Ranks have other numbers of parts, of which some have no word.
TEST(MeanOver, IsThatOfOneDeviceInPartsAndSlices) {
  const auto way = ways()[0];
  const auto expected = on_one_device(way);
  for (const int ranks : {1, 3}) {
    for (const int parts : {2, 4}) EXPECT_THAT(on_ranks(ranks, way, 0, parts), IsNear(expected)) << ranks << parts;
  }
  EXPECT_THAT(on_ranks(2, way, 0, 1, lockstep::Sharded::gradients), IsNear(expected));
  EXPECT_THAT(on_ranks(2, way, 0, 1, lockstep::Sharded::parameters), IsNear(expected));
}

TEST(MeanOver, HasTheSameBitsByGrains) {
  for (const auto& way : {ways()[0], ways()[2]}) {
    const auto expected = on_ranks(1, way, 2, 1);
    EXPECT_THAT(expected, IsNear(on_one_device(way)));
    for (const int ranks : {2, 3}) {
      for (const int parts : {1, 2}) {
        const auto weights = on_ranks(ranks, way, 2, parts);
        for (size_t i = kSteps; i < expected.size(); ++i) EXPECT_TRUE(weights[i].equal(expected[i])) << ranks << parts;
      }
    }
  }
}

TEST(MeanOver, OfABatchWithoutAnyIsZero) {
  lockstep::run(lockstep::test_devices(2), [](Rank& rank) {
    DataParallel net(rank.in_turn([] { return net_of(true); }), rank);
    const lockstep::Dataset none{torch::randn({4, kLength, 5}, torch::kDouble), torch::full({4, kLength}, kPadding)};
    for (const auto& batch : lockstep::batches(none, {.size = 4}, rank)) {
      lockstep::Loss loss = net.loss(batch, MeanOver(sum_of_words, words));
      loss.backward();
      EXPECT_EQ(loss.global_item(), 0);
    }
    for (const auto& parameter : net->parameters()) EXPECT_EQ(parameter.grad().abs().max().item<double>(), 0);
  });
}

TEST(MeanOver, TakesTwoLossesOfEachPart) {
  const auto way = ways()[0];
  const auto data = sentences();
  lockstep::run(lockstep::test_devices(2), [&](Rank& rank) {
    DataParallel net(rank.in_turn([] { return net_of(true); }), rank);
    const auto letters = [](const torch::Tensor& y) { return y.ne(kPadding).sum() * 7; };
    const auto gradient_of = [&](const std::function<void(const Batch&)>& backward) {
      for (auto& parameter : net->parameters()) parameter.mutable_grad().reset();
      for (const auto& batch : lockstep::batches(data, {.size = kSamples, .shuffle = false}, rank)) {
        const auto all = batch.in_parts(rank.index() + 1);
        for (size_t part = 0; part < all.size(); ++part) {
          std::optional<lockstep::NoSync> later;
          if (part + 1 < all.size()) later.emplace(net.replica());
          backward(all[part]);
        }
      }
      return net->parameters()[0].grad().clone();
    };
    const auto once = gradient_of([&](const Batch& part) { net.loss(part, MeanOver(sum_of_words, words)).backward(); });
    const auto both = gradient_of([&](const Batch& part) {
      {
        const auto later = net.no_sync();
        net.loss(part, MeanOver(sum_of_words, words)).backward();
      }
      net.loss(part, MeanOver(sum_of_words, letters)).backward();
    });
    EXPECT_TRUE(both.allclose(once * 8 / 7, 1e-12, 1e-14));
  });
}

TEST(MeanOver, RefusesWhatItCannotKnow) {
  const auto refused = [](const std::function<void(DataParallel<Net>&, Batch)>& use) {
    return error_of([&] {
      lockstep::run(lockstep::test_devices(2), [&](Rank& rank) {
        DataParallel net(rank.in_turn([] { return net_of(true); }), rank);
        for (const auto& batch : lockstep::batches(sentences(), {.size = kSamples}, rank)) use(net, batch);
      });
    });
  };
  const MeanOver mean(sum_of_words, words);
  EXPECT_THAT(refused([&](auto& net, const Batch& batch) {
                Batch part = batch.in_parts(2)[0];
                part.y = part.y.clone();  // the whole batch's targets are counted
                net.loss(part, mean).backward();
              }),
              Refused("criterion"));
  EXPECT_THAT(refused([&](auto& net, Batch batch) {
                batch.x = batch.x.slice(0, 0, 2);  // a part that nobody knows to be one
                batch.y = batch.y.slice(0, 0, 2);
                net.loss(batch, mean).backward();
              }),
              Refused("criterion"));
  EXPECT_THAT(
      refused([&](auto& net, const Batch& batch) {
        net.loss(batch, MeanOver(sum_of_words, [](const torch::Tensor& y) { return y.ne(kPadding); })).backward();
      }),
      Refused("criterion"));
  EXPECT_THAT(refused([&](auto& net, const Batch& batch) {
                net.loss(batch, [&](const Batch& part) { return Criterion(mean)(net(part.x), part); }).backward();
              }),
              Refused("criterion"));
}

// 16 bits end at 65504, and the sum of these losses is larger.
TEST(MeanOver, OfFloat16OutputsAddsUpInMoreBits) {
  const torch::Tensor y_hat = torch::full({4000, 3}, 40.0).index_fill(1, torch::tensor({0}), 0).to(torch::kHalf);
  const torch::Tensor y = torch::zeros({4000}, torch::kLong);
  const auto options = F::CrossEntropyFuncOptions().weight(torch::tensor({2.0, 1.0, 1.0}).to(torch::kHalf));
  EXPECT_NEAR(Criterion(F::cross_entropy, options)(y_hat, y).item<double>(), 40 + std::log(2), 1e-3);
}

TEST(MeanOfNumbers, TakesSumsOfWeights) {
  const auto data = sentences();
  const auto way = ways()[2];
  const auto weights = [](const torch::Tensor& y) {
    return lockstep::detail::counted_targets(y, weighted().weight(), kPadding);
  };
  std::vector<torch::Tensor> gradients(3);
  for (const int ranks : {1, 2}) {
    lockstep::run(lockstep::test_devices(ranks), [&](Rank& rank) {
      DataParallel net(rank.in_turn([] { return net_of(false); }), rank);
      for (const auto& batch : lockstep::batches(data, {.size = kSamples, .shuffle = false}, rank)) {
        const double here = weights(batch.y).item<double>(), everywhere = weights(data.y).item<double>();
        lockstep::Loss loss = net.mean(F::cross_entropy(net(batch.x), batch.y, weighted()), here, everywhere);
        loss.backward();
        EXPECT_NEAR(loss.global_item(), way.on_one_device(net(data.x), data.y).item<double>(), 1e-13);
      }
      if (rank.index() == 0) gradients[static_cast<size_t>(ranks)] = net->parameters()[0].grad().clone();
    });
  }
  EXPECT_TRUE(gradients[1].allclose(gradients[2], 1e-13, 1e-14));
}

// Some parts' weights add up to whole numbers by chance, others do not.
TEST(MeanOfNumbers, AddsUpPartsOfWholeAndOtherNumbers) {
  lockstep::run(lockstep::test_devices(2), [](Rank& rank) {
    DataParallel net(rank.in_turn([] { return net_of(false); }), rank);
    const torch::Tensor x = torch::ones({1, kLength, 5}, torch::kDouble);
    const std::vector<double> here = rank.index() == 0 ? std::vector{0.5, 2.0} : std::vector{2.0, 0.5};
    {
      const auto later = net.no_sync();
      net.mean(net(x).mean(), here[0], 5).backward();
    }
    net.mean(net(x).mean(), here[1], 5).backward();
    const auto whole = torch::autograd::grad({net(x).mean()}, {net->parameters()[0]});
    EXPECT_TRUE(net->parameters()[0].grad().allclose(whole[0], 1e-13, 1e-14));
  });
}

}  // namespace mean_over_test
