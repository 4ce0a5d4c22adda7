// Labels: 3x3
// LossScaler: the weights are those of a scaler written by hand on one device, and all ranks skip the same steps.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/data_parallel/data_parallel.hpp>
#include <lockstep/devices/autocast.hpp>
#include <lockstep/lab/check_arithmetic.hpp>
#include <lockstep/lab/loss_scaler.hpp>
#include <lockstep/nn/tensor_files.hpp>
#include <lockstep/split/split_model.hpp>

#include "support/group_tests.hpp"
#include "support/scratch_folder.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace lockstep {
namespace loss_scaler_test {

namespace F = torch::nn::functional;
namespace nn = torch::nn;
using testing::Each;
using torch::Tensor;

constexpr double kTolerance = 1e-13, kClip = 0.5;
constexpr int kEpochs = 4;
constexpr int64_t kSize = 5;

using LossScalerWorlds = Worlds;
INSTANTIATE_TEST_SUITE_P(Sizes, LossScalerWorlds, testing::Values(1, 2, 3),
                         [](const auto& info) { return std::to_string(info.param) + "Ranks"; });

nn::Sequential net_of_two_layers() {
  torch::manual_seed(3);
  nn::Sequential net(nn::Linear(4, 6), nn::Tanh(), nn::Linear(6, 2));
  net->to(torch::kDouble);
  return net;
}

// The last sample's target is infinite, so that the steps of its batches are skipped.
Dataset samples() {
  const Tensor y = torch::cos(torch::arange(24, torch::kDouble)).view({12, 2}).contiguous();
  y[11].fill_(std::numeric_limits<double>::infinity());
  return {torch::sin(torch::arange(48, torch::kDouble)).view({12, 4}), y};
}

LossScaler::Options often() {
  return {.scale = 1024, .interval = 2};
}

struct Results {
  nn::Sequential net;
  std::vector<double> scales;
};

// The scaler of an engineer who has LibTorch alone.
Results on_one_device() {
  Results results{net_of_two_layers(), {}};
  torch::optim::SGD sgd(results.net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  double scale = often().scale;
  int64_t good = 0;
  for (int epoch = 0; epoch < kEpochs; ++epoch) {
    for (const auto& batch : batches(samples(), {.size = kSize, .epoch = epoch})) {
      sgd.zero_grad();
      (F::mse_loss(results.net->forward(batch.x), batch.y) * scale).backward();
      bool finite = true;
      for (auto& parameter : results.net->parameters()) {
        parameter.mutable_grad().div_(scale);
        finite = finite && parameter.grad().isfinite().all().item<bool>();
      }
      if (finite) {
        nn::utils::clip_grad_norm_(results.net->parameters(), kClip);
        sgd.step();
      }
      good = finite ? good + 1 : 0;
      if (!finite) scale /= 2;
      if (good == often().interval) {
        scale *= 2;
        good = 0;
      }
      results.scales.push_back(scale);
    }
  }
  return results;
}

struct Way {
  Sharded sharded = Sharded::nothing;
  int64_t grain = 0;
  int parts = 1;
};

// Compares this rank's training with `expected`, and gives the weights of rank 0.
std::vector<Tensor> train(Rank& rank, const Way& way, const Results& expected) {
  DataParallel net(rank.in_turn(net_of_two_layers), rank, {.sharded = way.sharded});
  Optimizer sgd(net, torch::optim::SGDOptions(0.1).momentum(0.9));
  LossScaler scaler(often());
  std::vector<double> scales;
  for (int epoch = 0; epoch < kEpochs; ++epoch) {
    for (const auto& batch : batches(samples(), {.size = kSize, .epoch = epoch, .grain = way.grain}, rank)) {
      sgd.zero_grad();
      const auto parts = batch.in_parts(way.parts);
      for (size_t i = 0; i < parts.size(); ++i) {
        std::optional<NoSync> later;
        if (i + 1 < parts.size()) later.emplace(net.replica());
        scaler.scale(net.loss(parts[i], F::mse_loss)).backward();
      }
      const double before = scaler.scale();
      const Step step = scaler.step(sgd, {.clip = kClip});
      EXPECT_EQ(step.taken, scaler.scale() >= before);
      scales.push_back(scaler.scale());
    }
  }
  EXPECT_EQ(scales, expected.scales);
  const auto whole = net.whole();
  std::vector<Tensor> weights;
  const auto parameters = expected.net->named_parameters();
  for (const auto& item : net->named_parameters()) {
    expect_near(item.value().detach(), parameters[item.key()].detach(), kTolerance, item.key());
    weights.push_back(on_host(item.value()));
  }
  return weights;
}

TEST_P(LossScalerWorlds, TrainsAsAScalerByHandOnOneDevice) {
  const Results expected = on_one_device();
  EXPECT_LT(expected.scales.back(), *std::max_element(expected.scales.begin(), expected.scales.end()));
  for (const auto sharded : {Sharded::nothing, Sharded::state, Sharded::gradients, Sharded::parameters}) {
    SCOPED_TRACE(static_cast<int>(sharded));
    on_ranks([&](Rank& rank) { train(rank, {.sharded = sharded}, expected); });
  }
  on_ranks([&](Rank& rank) { train(rank, {.parts = 2}, expected); });
}

TEST(LossScaler, ByGrainsTheBitsAreThoseOfAnyNumberOfRanks) {
  const Results expected = on_one_device();
  std::vector<Tensor> first;
  for (const int ranks : {1, 2, 3}) {
    std::vector<Tensor> weights;
    run(test_devices(ranks), [&](Rank& rank) {
      const auto mine = train(rank, {.grain = 2, .parts = 2}, expected);
      if (rank.index() == 0) weights = mine;
    });
    if (ranks == 1) first = weights;
    for (size_t i = 0; i < first.size(); ++i) EXPECT_TRUE(weights[i].equal(first[i])) << ranks << " " << i;
  }
}

// ---- Float16.

// A sample's gradient within backward is 3 * scale / 8, which float16 holds up to a scale of 131072.
std::vector<bool> steps_in_float16(Rank& rank) {
  DataParallel net(rank.in_turn([] {
    nn::Linear layer(nn::LinearOptions(4, 1).bias(false));
    nn::init::zeros_(layer->weight);
    return layer;
  }),
                   rank);
  Optimizer sgd(net, torch::optim::SGDOptions(1));
  LossScaler scaler({.interval = 2});
  std::vector<bool> taken;
  const Dataset data{torch::full({8, 4}, 1.0 / 1024), torch::zeros({8})};
  for (int epoch = 0; epoch < 30; ++epoch) {
    for (const auto& batch : batches(data, {.size = 8}, rank)) {
      sgd.zero_grad();
      Loss loss = [&] {
        const Autocast half(rank.device(), at::kHalf);
        return net.loss(batch, [](const Tensor& y_hat, const Tensor&) {
          EXPECT_EQ(y_hat.scalar_type(), at::kHalf);
          return y_hat.to(at::kFloat).mean() * 3;
        });
      }();
      scaler.scale(loss).backward();
      taken.push_back(scaler.step(sgd).taken);
    }
  }
  const double moved = 3.0 / 1024 * static_cast<double>(std::count(taken.begin(), taken.end(), true));
  EXPECT_TRUE(net->weight.detach().cpu().allclose(torch::full({1, 4}, -moved), 1e-3, 0)) << net->weight;
  return taken;
}

// The first four steps double the scale twice, and from then on each third one overflows.
TEST_P(LossScalerWorlds, MoreRanksDoNotOverflowEarlier) {
  std::vector<bool> expected;
  for (int step = 0; step < 30; ++step) expected.push_back(step < 4 || step % 3 != 1);
  on_ranks([&](Rank& rank) { EXPECT_EQ(steps_in_float16(rank), expected); });
}

// ---- A checkpoint.

TEST(LossScaler, GoesOnFromAFile) {
  const ScratchFolder folder;
  const auto file = folder.path() / "scaler.safetensors";
  const Results expected = on_one_device();
  run(test_devices(1), [&](Rank& rank) {
    DataParallel net(net_of_two_layers(), rank);
    Optimizer sgd(net, torch::optim::SGDOptions(0.1).momentum(0.9));
    std::optional<LossScaler> scaler(often());
    size_t steps = 0;
    for (int epoch = 0; epoch < kEpochs; ++epoch) {
      for (const auto& batch : batches(samples(), {.size = kSize, .epoch = epoch}, rank)) {
        sgd.zero_grad();
        scaler->scale(net.loss(batch, F::mse_loss)).backward();
        scaler->step(sgd);
        ASSERT_EQ(scaler->scale(), expected.scales[steps++]);
        save_tensors(file, scaler->state());
        scaler.emplace(LossScaler::Options{.scale = 1, .interval = often().interval});
        scaler->load_state(load_tensors(file));
      }
    }
  });
  LossScaler scaler;
  EXPECT_THAT(error_of([&] { scaler.load_state({{"scale", torch::ones({})}}); }), Refused());
}

// ---- What is refused.

TEST(LossScaler, RefusesWhatItCannotScale) {
  for (const auto& options : std::vector<LossScaler::Options>{
           {.scale = 0}, {.scale = INFINITY}, {.growth = 0.5}, {.backoff = 0}, {.backoff = 2}, {.interval = 0}})
    EXPECT_THAT(error_of([&] { LossScaler scaler(options); }), Refused());
  const Dataset data{torch::ones({4, 3}), torch::ones({4, 2})};
  const auto scaled = [&](Rank& rank, auto& net, const Criterion& criterion, int64_t grain) {
    Optimizer sgd(net, torch::optim::SGDOptions(0.1));
    LossScaler scaler;
    for (const auto& batch : batches(data, {.size = 4, .grain = grain}))
      scaler.scale(net.loss(batch, criterion)).backward();
    scaler.step(sgd);
  };
  const auto on_a_rank = [](const auto& body) { return error_on_ranks(1, body); };
  EXPECT_THAT(on_a_rank([&](Rank& rank) {  // a loss of 16 bits
                DataParallel net(nn::Linear(3, 2), rank);
                scaled(
                    rank, net, [](auto& y_hat, auto& y) { return F::mse_loss(y_hat, y).to(at::kHalf); }, 0);
              }),
              Refused());
  EXPECT_THAT(on_a_rank([&](Rank& rank) {  // gradients of 16 bits
                nn::Linear layer(3, 2);
                layer->to(at::kHalf);
                DataParallel net(layer, rank);
                Optimizer sgd(net, torch::optim::SGDOptions(0.1));
                LossScaler scaler;
                scaler.scale(net.mean(net(data.x.to(at::kHalf)).to(at::kFloat).mean(), 4, 4)).backward();
                scaler.step(sgd);
              }),
              Refused());
  EXPECT_THAT(on_a_rank([&](Rank& rank) {  // no scaled loss
                DataParallel net(nn::Linear(3, 2), rank);
                Optimizer sgd(net, torch::optim::SGDOptions(0.1));
                net.mean(net(data.x).mean(), 4, 4).backward();
                LossScaler().step(sgd);
              }),
              Refused());
  EXPECT_THAT(on_a_rank([&](Rank& rank) {
                DataParallel net(nn::Linear(3, 2), rank, {.grain_check = check_arithmetic(1)});
                scaled(rank, net, F::mse_loss, 2);
              }),
              Refused());
  EXPECT_THAT(error_on_ranks(2,
                             [&](Rank& rank) {
                               SplitModel net(nn::Sequential(nn::Linear(3, 3), nn::Linear(3, 2)), rank,
                                              {.mesh = {.pipeline = 2}});
                               scaled(rank, net, F::mse_loss, 0);
                             }),
              Refused());
}

}  // namespace loss_scaler_test
}  // namespace lockstep
