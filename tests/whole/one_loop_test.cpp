// Labels: concurrency
// A user's loop, written once: in every layout it trains what one device trains, and goes on in any other.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/data_parallel/optimizer.hpp>
#include <lockstep/split/split_model.hpp>

#include "support/error_of.hpp"
#include "support/group_tests.hpp"
#include "support/scratch_folder.hpp"
#include "support/test_devices.hpp"

#include <cmath>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace one_loop_test {

using namespace lockstep;
using torch::Tensor;
namespace F = torch::nn::functional;
namespace nn = torch::nn;

constexpr double kClip = 0.4;
const torch::optim::AdamWOptions kAdam(0.02);

nn::Sequential make_net() {
  torch::manual_seed(3);
  nn::Sequential net;
  net->push_back("in", nn::Linear(6, 8));
  net->push_back("tanh", nn::Tanh());
  net->push_back("middle", nn::Linear(8, 8));
  net->push_back("relu", nn::ReLU());
  net->push_back("out", nn::Linear(8, 4));
  net->to(torch::kDouble);
  return net;
}

// The loss of one sample is NaN, so that one of an epoch's three batches is skipped.
Dataset samples() {
  torch::manual_seed(5);
  const Tensor x = torch::randn({28, 6}, torch::kDouble) * 3;
  x[17] = std::numeric_limits<double>::quiet_NaN();
  return {x, torch::randint(4, {28})};
}

struct Trained {
  std::vector<double> losses, norms;  // losses and norms of the steps that were taken
  nn::Sequential net{nullptr};
};

// The loop. `partner`: the ranks that share out batches.
template <class Net, class Partner>
void train(Net& net, Optimizer& adam, const Dataset& data, const Partner& partner, int64_t epoch, Trained& trained) {
  net.train();
  for (auto& batch : batches(data, {.size = 10, .epoch = epoch}, partner)) {
    adam.zero_grad();
    Loss loss = net.loss(batch, F::cross_entropy);
    loss.backward();
    const Step step = adam.step({.clip = kClip, .skip_not_finite = true});
    const double mean = loss.global_item();
    if (!step.taken) continue;
    trained.losses.push_back(mean);
    trained.norms.push_back(step.norm.item<double>());
  }
}

// The same of batches in two parts each.
template <class Net, class Partner>
void train_in_parts(Net& net, Optimizer& adam, const Dataset& data, const Partner& partner) {
  for (auto& batch : batches(data, {.size = 10}, partner)) {
    adam.zero_grad();
    const auto parts = batch.in_parts(2);
    {
      const auto more_to_come = net.no_sync();
      net.loss(parts[0], F::cross_entropy).backward();
    }
    net.loss(parts[1], F::cross_entropy).backward();
    adam.step({.clip = kClip, .skip_not_finite = true});
  }
}

void train_alone(nn::Sequential& net, torch::optim::AdamW& adam, int64_t epoch, Trained& trained) {
  for (auto& batch : batches(samples(), {.size = 10, .epoch = epoch})) {
    adam.zero_grad();
    const Tensor loss = F::cross_entropy(net->forward(batch.x), batch.y);
    loss.backward();
    const double norm = torch::nn::utils::clip_grad_norm_(net->parameters(), kClip);
    if (!std::isfinite(norm)) continue;
    adam.step();
    trained.losses.push_back(loss.item<double>());
    trained.norms.push_back(norm);
  }
}

struct Layout {
  std::string name;
  int ranks;
  std::optional<ModelSplit> split;  // none: a DataParallel
  Sharded sharded = Sharded::nothing;
};

std::vector<Layout> layouts() {
  return {{"plain", 3, {}},
          {"ZeRO 1", 2, {}, Sharded::state},
          {"pipeline 2", 2, ModelSplit{.mesh = {.pipeline = 2}, .microbatches = 3}},
          {"ZeRO 2", 4, {}, Sharded::gradients},
          {"tensor 2", 2, ModelSplit{.mesh = {.tensor = 2}}},
          {"ZeRO 3", 3, {}, Sharded::parameters},
          {"data 2 x pipeline 2", 4, ModelSplit{.mesh = {.data = 2, .pipeline = 2}, .microbatches = 2}},
          {"data 2 x tensor 2, ZeRO 1", 4, ModelSplit{.mesh = {.data = 2, .tensor = 2}}, Sharded::state},
          {"pipeline 2 x tensor 2", 4, ModelSplit{.mesh = {.pipeline = 2, .tensor = 2}, .microbatches = 2}},
          {"a SplitModel by data", 2, ModelSplit{.mesh = {.data = 2}}},
          {"one device", 1, {}}};
}

void put_whole(DataParallel<nn::SequentialImpl>& net, nn::Sequential& whole) {
  const auto all = net.whole();
  const torch::NoGradGuard no_grad;
  const auto values = net->named_parameters();
  for (auto& item : whole->named_parameters()) item.value().copy_(values[item.key()]);
}
void put_whole(SplitModel& net, nn::Sequential& whole) {
  const auto all = net.whole();
  net.gather(whole);
}

// Calls body(net, partner) on the ranks of a layout, for a net with the weights of `start`.
template <class Body>
void in_layout(const Layout& layout, const nn::Sequential& start, const Body& body) {
  run(test_devices(layout.ranks), [&](Rank& rank) {
    const nn::Sequential mine = rank.in_turn([&] { return copy_of(start); });
    if (layout.split) {
      SplitModel net(mine, rank, *layout.split, {.bucket_bytes = 300, .sharded = layout.sharded});
      body(net, net.mesh().data(), rank);
    } else {
      DataParallel net(mine, rank, {.bucket_bytes = 300, .sharded = layout.sharded});
      body(net, rank, rank);
    }
  });
}

void expect_alike(const Trained& found, const Trained& expected) {
  ASSERT_EQ(found.losses.size(), expected.losses.size());
  for (size_t i = 0; i < expected.losses.size(); ++i) {
    EXPECT_NEAR(found.losses[i], expected.losses[i], 1e-11) << i;
    EXPECT_NEAR(found.norms[i], expected.norms[i], 1e-10) << i;
  }
  for (const auto& item : expected.net->named_parameters()) {
    expect_near(found.net->named_parameters()[item.key()].detach(), item.value().detach(), 1e-10, item.key());
  }
}

// The first epoch in one layout, the second in the next one, from the optimizer's file.
TEST(OneLoop, TrainsAsOneDeviceInEveryLayoutAndGoesOnInAnother) {
  Trained alone{.net = make_net()}, first_epoch;
  torch::optim::AdamW adam(alone.net->parameters(), kAdam);
  train_alone(alone.net, adam, 0, alone);
  first_epoch = {alone.losses, alone.norms, copy_of(alone.net)};
  train_alone(alone.net, adam, 1, alone);
  ASSERT_EQ(alone.losses.size(), 4u);
  ASSERT_GT(alone.norms[0], kClip);

  const ScratchFolder folder;
  const auto file = folder / "adam.safetensors";
  const Dataset data = samples();
  const auto all = layouts();
  for (size_t i = 0; i < all.size(); ++i) {
    SCOPED_TRACE(all[i].name);
    Trained found;
    const auto epoch_in = [&](const Layout& layout, const nn::Sequential& start, int64_t epoch) {
      in_layout(layout, start, [&](auto& net, Rank& partner, Rank& rank) {
        Optimizer adam(net, kAdam);
        if (epoch > 0) adam.load(file);
        Trained here{.net = copy_of(start)};
        train(net, adam, data.to(rank.device()), partner, epoch, here);
        adam.save(file);
        put_whole(net, here.net);
        if (rank.index() != 0) return;
        found.losses.insert(found.losses.end(), here.losses.begin(), here.losses.end());
        found.norms.insert(found.norms.end(), here.norms.begin(), here.norms.end());
        found.net = here.net;
      });
    };
    epoch_in(all[i], make_net(), 0);
    expect_alike(found, first_epoch);
    const Layout& next = all[(i + 1) % all.size()];
    SCOPED_TRACE("then " + next.name);
    epoch_in(next, copy_of(found.net), 1);
    expect_alike(found, alone);
  }
}

TEST(OneLoop, AddsUpPartsInEveryLayout) {
  Trained alone{.net = make_net()};
  torch::optim::AdamW adam(alone.net->parameters(), kAdam);
  train_alone(alone.net, adam, 0, alone);
  const Dataset data = samples();
  for (const Layout& layout : layouts()) {
    SCOPED_TRACE(layout.name);
    Trained found{.net = make_net()};
    in_layout(layout, make_net(), [&](auto& net, Rank& partner, Rank& rank) {
      Optimizer adam(net, kAdam);
      train_in_parts(net, adam, data.to(rank.device()), partner);
      auto whole = rank.in_turn(make_net);
      put_whole(net, whole);
      if (rank.index() == 0) found.net = whole;
    });
    for (const auto& item : alone.net->named_parameters()) {
      expect_near(found.net->named_parameters()[item.key()].detach(), item.value().detach(), 1e-10, item.key());
    }
  }
}

// ---- LibTorch's own, over a net of which a rank has a part.

const std::vector<ModelSplit> kDivided = {{.mesh = {.pipeline = 2}},
                                          {.mesh = {.tensor = 2}},
                                          {.mesh = {.data = 2, .pipeline = 2}},
                                          {.mesh = {.data = 2, .tensor = 2}}};

template <class Net>
constexpr bool kHandsOutParameters = requires(Net& net) {
  net.parameters();
}
|| requires(Net& net) {
  net.module();
}
|| requires(Net& net) {
  net.replicas();
}
|| requires(Net& net) {
  *net;
};
static_assert(!kHandsOutParameters<SplitModel> && kHandsOutParameters<DataParallel<nn::SequentialImpl>>);

TEST(OneLoop, AnOptimizerOfLibTorchsOverADividedNetsLayersIsRefused) {
  const Dataset data = samples();
  for (const ModelSplit& split : kDivided) {
    EXPECT_THAT(error_on_ranks(split.mesh.size(),
                               [&](Rank& rank) {
                                 const nn::Sequential layers = rank.in_turn(make_net);
                                 SplitModel net(layers, rank, split);
                                 torch::optim::SGD sgd(layers->parameters(), 0.1);
                                 for (auto& batch : batches(data, {.size = 10}, net.mesh().data())) {
                                   net.loss(batch, F::cross_entropy).backward();
                                   sgd.step();
                                 }
                               }),
                Refused())
        << to_string(split);
  }
}

// They change nothing: there are no gradients in `.grad`.
TEST(OneLoop, BesideAnOptimizerLibTorchsOwnFindNothingInADividedNet) {
  Trained alone{.net = make_net()};
  torch::optim::AdamW adam(alone.net->parameters(), kAdam);
  train_alone(alone.net, adam, 0, alone);
  const Dataset data = samples();
  for (const ModelSplit& split : kDivided) {
    SCOPED_TRACE(to_string(split));
    run(test_devices(split.mesh.size()), [&](Rank& rank) {
      const nn::Sequential layers = rank.in_turn(make_net);
      SplitModel net(layers, rank, split);
      Optimizer adam(net, kAdam);
      torch::optim::SGD sgd(layers->parameters(), 0.1);
      for (auto& batch : batches(data.to(rank.device()), {.size = 10}, net.mesh().data())) {
        adam.zero_grad();
        net.loss(batch, F::cross_entropy).backward();
        for (const auto& parameter : layers->parameters()) EXPECT_FALSE(parameter.grad().defined());
        EXPECT_EQ(torch::nn::utils::clip_grad_norm_(layers->parameters(), 1e-3), 0);
        sgd.zero_grad(/*set_to_none=*/false);
        sgd.step();
        adam.step({.clip = kClip, .skip_not_finite = true});
      }
      auto whole = rank.in_turn(make_net);
      net.gather(whole);
      for (const auto& item : alone.net->named_parameters()) {
        expect_near(whole->named_parameters()[item.key()], item.value().detach(), 1e-10, item.key());
      }
    });
  }
}

// The layers' own zero_grad() clears nothing, so that the gradients of two steps would add up.
TEST(OneLoop, AStepsGradientsAreClearedByTheOptimizerAlone) {
  const Dataset data = samples();
  for (const ModelSplit& split : kDivided) {
    const auto error = error_on_ranks(split.mesh.size(), [&](Rank& rank) {
      nn::Sequential layers = rank.in_turn(make_net);
      SplitModel net(layers, rank, split);
      Optimizer adam(net, kAdam);
      for (auto& batch : batches(data.to(rank.device()), {.size = 10}, net.mesh().data())) {
        layers->zero_grad();
        net.loss(batch, F::cross_entropy).backward();
        adam.step();
      }
    });
    EXPECT_THAT(error, Refused()) << to_string(split);
  }
}

// ---- The options, and parameters that are frozen.

std::vector<ModelSplit> splits() {
  std::vector<ModelSplit> splits = kDivided;
  splits.push_back({.mesh = {.pipeline = 2, .tensor = 2}});
  return splits;
}

TEST(OneLoop, OptionsThatDifferBetweenRanksAreRefusedInEverySplit) {
  const Dataset data = samples();
  const std::vector<std::function<void(Optimizer&)>> changes = {
      [](Optimizer& adam) { adam.set_lr(0.5); },
      [](Optimizer& adam) { Optimizer::set_weight_decay(adam.param_groups()[0], 0.5); }};
  for (const ModelSplit& split : splits()) {
    for (const auto& change : changes) {
      for (int other = 1; other < split.mesh.size(); ++other) {
        EXPECT_THAT(error_on_ranks(split.mesh.size(),
                                   [&](Rank& rank) {
                                     SplitModel net(rank.in_turn(make_net), rank, split);
                                     Optimizer adam(net, kAdam);
                                     if (rank.index() == other) change(adam);
                                     for (auto& batch : batches(data, {.size = 10}, net.mesh().data())) {
                                       net.loss(batch, F::cross_entropy).backward();
                                       adam.step();
                                     }
                                   }),
                    Fails(Error::difference))
            << to_string(split) << ", rank " << other;
      }
    }
  }
}

// Frozen now: the state is left out. Free now: the state begins anew. Then it goes on as on one device.
TEST(OneLoop, ParametersMayBeFrozenOrFreedBetweenSaveAndLoadInEverySplit) {
  const ScratchFolder folder;
  const Dataset data = samples();
  const auto freeze = [](const nn::Sequential& net, const std::string& layer) {
    for (const auto& item : net->named_parameters()) item.value().requires_grad_(!item.key().starts_with(layer));
  };
  const auto trained = [&](const ModelSplit& split) {
    const auto file = folder / "adam.safetensors";
    nn::Sequential found = make_net();
    std::vector<std::string> warnings;
    for (const std::string frozen : {"middle", "out"}) {
      run(test_devices(split.mesh.size()),
          [&](Rank& rank) {
            const nn::Sequential layers = rank.in_turn([&] { return copy_of(found); });
            freeze(layers, frozen);
            SplitModel net(layers, rank, split);
            Optimizer adam(net, kAdam);
            if (frozen == "out") adam.load(file);
            Trained here;
            train(net, adam, data.to(rank.device()), net.mesh().data(), 0, here);
            adam.save(file);
            auto whole = rank.in_turn([&] { return copy_of(found); });
            rank.barrier();
            net.gather(whole);
            if (rank.index() == 0) found = whole;
          },
          {.on_warning = [&](const std::string& text) { warnings.push_back(text); }});
    }
    const auto told = [&](const std::string& text) { return testing::Contains(testing::HasSubstr(text)); };
    EXPECT_THAT(warnings, told("state of parameters that are frozen now is left out")) << to_string(split);
    EXPECT_THAT(warnings, told("no state of these parameters, which begin anew")) << to_string(split);
    return found;
  };
  const auto alone = trained({});
  for (const ModelSplit& split : splits()) {
    const auto found = trained(split);
    for (const auto& item : alone->named_parameters()) {
      expect_near(found->named_parameters()[item.key()].detach(), item.value().detach(), 1e-10,
                  to_string(split) + " " + item.key());
    }
  }
}

// Split by data alone, each rank has the whole network.
TEST(OneLoop, OfANetThatIsSplitByDataAloneLibTorchsOptimizerTrains) {
  Trained alone{.net = make_net()};
  torch::optim::AdamW adam(alone.net->parameters(), kAdam);
  train_alone(alone.net, adam, 0, alone);
  const Dataset data = samples();
  run(test_devices(2), [&](Rank& rank) {
    const nn::Sequential layers = rank.in_turn(make_net);
    SplitModel net(layers, rank, {.mesh = {.data = 2}});
    torch::optim::AdamW adam(layers->parameters(), kAdam);
    for (auto& batch : batches(data.to(rank.device()), {.size = 10}, net.mesh().data())) {
      adam.zero_grad();
      net.loss(batch, F::cross_entropy).backward();
      const double norm = torch::nn::utils::clip_grad_norm_(layers->parameters(), kClip);
      if (std::isfinite(norm)) adam.step();
    }
    for (const auto& item : alone.net->named_parameters()) {
      expect_near(layers->named_parameters()[item.key()].detach(), item.value().detach(), 1e-10, item.key());
    }
  });
}

// ---- The loss of a pipeline.

TEST(OneLoop, APipelinesLossHasItsValueAfterBackward) {
  const Dataset data = samples();
  run(test_devices(2), [&](Rank& rank) {
    SplitModel net(rank.in_turn(make_net), rank, {.mesh = {.pipeline = 2}, .microbatches = 2});
    Optimizer sgd(net, torch::optim::SGDOptions(0.1));
    const Batch batch{data.x.slice(0, 0, 8).to(rank.device()), data.y.slice(0, 0, 8).to(rank.device()), 8};
    int calls = 0;
    const auto criterion = lockstep::Criterion::unchecked(
        [&](const Tensor& y_hat, const Tensor& y) { return ++calls, F::cross_entropy(y_hat, y); });
    Loss loss = net.loss(batch, criterion);
    EXPECT_THAT(error_of([&] { loss.item(); }), Refused());
    EXPECT_THAT(error_of([&] { loss.value(); }), Refused());
    EXPECT_THAT(error_of([&] { loss.global_item(); }), Refused());
    { Loss dropped = net.loss(batch, criterion); }
    if (rank.index() == 1) Loss dropped = net.loss(batch, criterion);  // nobody waits for it
    EXPECT_EQ(calls, 0);
    Loss copy = loss;
    copy.backward();
    EXPECT_EQ(calls, rank.index() == 1 ? 2 : 0);
    EXPECT_GT(loss.item(), 0);
    EXPECT_EQ(loss.item(), loss.global_item());
    EXPECT_EQ(net.steps_done(), 1);
    EXPECT_THAT(error_of([&] { loss.backward(); }), Refused());
    EXPECT_EQ(sgd.gradients().size(), rank.index() == 0 ? 4u : 2u);
  });
}

// Its value is of the rank's own part, and so is not of the same bits.
TEST(OneLoop, AGlobalItemOfAPipelineWithAGrainIsRefused) {
  const Dataset data = samples();
  run(test_devices(2), [&](Rank& rank) {
    SplitModel net(rank.in_turn(make_net), rank, {.mesh = {.pipeline = 2}});
    Optimizer sgd(net, torch::optim::SGDOptions(0.1));
    for (auto& batch : batches(data.to(rank.device()), {.size = 28, .grain = 5}, net.mesh().data())) {
      Loss loss = net.loss(batch, F::cross_entropy);
      loss.backward();
      EXPECT_THAT(error_of([&] { loss.global_item(); }), Refused());
    }
  });
}

// By grains SplitModel's backward() computes forward, so there is no value before, and no second one after it.
TEST(OneLoop, ALossByGrainsOfASplitModelHasItsValueAfterBackwardToo) {
  const Dataset data = samples();
  run(test_devices(2), [&](Rank& rank) {
    SplitModel net(rank.in_turn(make_net), rank, {.mesh = {.data = 2}});
    Optimizer sgd(net, torch::optim::SGDOptions(0.1));
    for (auto& batch : batches(data.to(rank.device()), {.size = 5, .grain = 5}, net.mesh().data())) {
      Loss loss = net.loss(batch, F::cross_entropy);  // one rank has no grain
      EXPECT_THAT(error_of([&] { loss.item(); }), Refused());
      EXPECT_THAT(error_of([&] { loss.global_item(); }), Refused());
      loss.backward();
      loss.global_item();
      EXPECT_THAT(error_of([&] { loss.backward(); }), Refused());
      break;
    }
  });
}

// One device does so too: a penalty's gradient adds to the loss's.
TEST(OneLoop, WhatABackwardOfOnesOwnAddsToADividedNetsGradientsCounts) {
  const Dataset data = samples();
  run(test_devices(2), [&](Rank& rank) {
    SplitModel net(rank.in_turn(make_net), rank, {.mesh = {.pipeline = 2}, .microbatches = 2});
    Optimizer sgd(net, torch::optim::SGDOptions(0.1));
    const Batch batch{data.x.slice(0, 0, 8).to(rank.device()), data.y.slice(0, 0, 8).to(rank.device()), 8};
    const auto gradients = [&](double decay) {
      sgd.zero_grad();
      const Tensor weight = sgd.param_groups()[0].params()[0];
      if (decay > 0) (decay * weight.pow(2).sum()).backward();
      net.loss(batch, F::cross_entropy).backward();
      return sgd.gradients()[0].clone();
    };
    const Tensor without = gradients(0), with = gradients(0.5);
    EXPECT_TRUE(torch::allclose(with - without, sgd.param_groups()[0].params()[0].detach()));
  });
}

}  // namespace one_loop_test
