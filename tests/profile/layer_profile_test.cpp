// Labels: repeated
// What is measured of small nets: bytes exactly, times plausibly.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/base/error.hpp>
#include <lockstep/models/models.hpp>
#include <lockstep/plan/plan.hpp>
#include <lockstep/profile/layer_profile.hpp>

#include <mutex>
#include <string>
#include <vector>

#include "support/error_of.hpp"

namespace layer_profile_test {

using namespace lockstep;
using testing::ElementsAre;
using torch::nn::Sequential;

Sequential small_net() {
  Sequential net;
  net->push_back("conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 4, 3)));  // 8 x 8 -> 6 x 6
  net->push_back("norm", torch::nn::BatchNorm2d(4));
  net->push_back("relu", torch::nn::ReLU());
  net->push_back("flatten", torch::nn::Flatten());
  net->push_back("fc", torch::nn::Linear(4 * 6 * 6, 10));
  return net;
}

Batch small_batch(int64_t samples) {
  return {torch::rand({samples, 1, 8, 8}), torch::arange(samples) % 10, samples};
}

at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& y) {
  return torch::nn::functional::cross_entropy(logits, y);
}

const ProfileOptions quick{.seconds = 0.2, .tensor_ranks = {2}};

ModelProfile profile_alone(const Sequential& net, const Batch& batch, const ProfileOptions& options = quick) {
  ModelProfile result;
  run(parse_devices("cpu"), [&](Rank& rank) { result = profile(net, batch, cross_entropy, rank, options); });
  return result;
}

TEST(LayerProfile, BytesAreExact) {
  const ModelProfile profile = profile_alone(small_net(), small_batch(32));
  EXPECT_EQ(profile.input_bytes, 8 * 8 * 4);
  ASSERT_EQ(profile.layers.size(), 5u);
  const auto expect = [&](size_t i, const char* name, double parameters, double buffers, double output, double saved) {
    const auto& layer = profile.layers[i];
    EXPECT_EQ(layer.name, name);
    EXPECT_EQ(layer.parameter_bytes, parameters) << name;
    EXPECT_EQ(layer.buffer_bytes, buffers) << name;
    EXPECT_EQ(layer.output_bytes, output) << name;
    EXPECT_EQ(layer.saved_bytes, saved) << name;
  };
  const double maps = 4 * 6 * 6 * 4;
  expect(0, "conv", (4 * 9 + 4) * 4, 0, maps, maps);
  // Its result, and the mean and the deviation of each channel, once per batch; num_batches_tracked counts, in place.
  expect(1, "norm", 8 * 4, 8 * 4 + 8, maps, maps + 2 * 4 * 4 / 32.0);
  expect(2, "relu", 0, 0, maps, 0);     // keeps its result, in the place of norm's, which nobody needs any more
  expect(3, "flatten", 0, 0, maps, 0);  // a view
  expect(4, "fc", (144 * 10 + 10) * 4, 0, 40, 40);
  EXPECT_THAT(profile.signature, ElementsAre("conv: weight [4, 1, 3, 3], bias [4]", "norm: weight [4], bias [4]",
                                             "relu:", "flatten:", "fc: weight [10, 144], bias [10]"));
}

TEST(LayerProfile, SlicesAreThoseOfShard) {
  const ModelProfile profile = profile_alone(small_net(), small_batch(8));
  const auto& halves = layers_of(profile, 2);
  EXPECT_EQ(halves[0].parameter_bytes, (2 * 9 + 2) * 4);
  EXPECT_EQ(halves[0].output_bytes, 2 * 6 * 6 * 4);
  EXPECT_EQ(halves[1].parameter_bytes, 4 * 4);
  EXPECT_EQ(halves[4].parameter_bytes, (72 * 10 + 10) * 4);
  for (size_t i = 0; i < 4; ++i) EXPECT_THAT(halves[i].forward_messages, ElementsAre()) << i;
  // The linear layer takes slices of features and adds what they give.
  ASSERT_EQ(halves[4].forward_messages.size(), 1u);
  EXPECT_EQ(halves[4].forward_messages[0].kind, LayerMessage::Kind::allreduce);
  EXPECT_EQ(halves[4].forward_messages[0].bytes_per_sample, 40);
}

TEST(LayerProfile, TimesArePositiveAndGrowWithTheWork) {
  Sequential net;
  net->push_back("thin", torch::nn::Linear(16, 16));
  net->push_back("relu", torch::nn::ReLU());
  net->push_back("in", torch::nn::Linear(16, 1024));
  net->push_back("wide", torch::nn::Linear(1024, 1024));
  net->push_back("out", torch::nn::Linear(1024, 10));
  const ModelProfile profile = profile_alone(net, {torch::rand({256, 16}), torch::zeros({256}, torch::kLong), 256},
                                             {.seconds = 60, .tensor_ranks = {}});
  for (const auto& layer : profile.layers) {
    std::vector<int64_t> samples;
    for (const auto& point : layer.forward.points) {
      samples.push_back(point.samples);
      EXPECT_GT(point.seconds, 0) << layer.name;
    }
    EXPECT_THAT(samples, ElementsAre(1, 2, 4, 8, 16, 32, 64, 128, 256));
    for (const auto& point : layer.backward.points) EXPECT_GT(point.seconds, 0) << layer.name;
  }
  const auto& thin = profile.layers[0];
  const auto& wide = profile.layers[3];
  EXPECT_GT(wide.forward.at(256), 10 * thin.forward.at(256));  // 4096 times the multiplications
  EXPECT_GT(wide.backward.at(256), 10 * thin.backward.at(256));
  EXPECT_GT(wide.forward.at(256), 3 * wide.forward.at(1));
  // A weight's gradient is as large for one sample as for all; those of input and output are not.
  EXPECT_NEAR(wide.fixed_workspace_bytes, 4 * 1024 * 1024, 4 * 1024 * 8);
  EXPECT_NEAR(wide.workspace_bytes, 2 * 4 * 1024, 64);
  EXPECT_GT(profile.loss.forward.at(256), 0);
  EXPECT_GT(profile.update_seconds, 0);
}

// A whole net's step ends there too: nothing before the first parameters needs a gradient, so neither does their input.
TEST(LayerProfile, BackwardEndsAtTheFirstParameters) {
  Sequential net;
  net->push_back("flatten", torch::nn::Flatten());
  net->push_back("tanh", torch::nn::Tanh());
  net->push_back("fc", torch::nn::Linear(64, 10));
  const ModelProfile profile = profile_alone(net, small_batch(32));
  EXPECT_EQ(profile.layers[0].backward.at(32), 0);
  EXPECT_EQ(profile.layers[1].backward.at(32), 0);
  EXPECT_GT(profile.layers[1].forward.at(32), 0);
  EXPECT_GT(profile.layers[2].backward.at(32), 0);
}

TEST(LayerProfile, TheNetStaysAsItIs) {
  const Sequential net = small_net();
  const auto before = net->named_buffers()["norm.running_mean"].clone();
  profile_alone(net, small_batch(8));
  EXPECT_TRUE(torch::equal(net->named_buffers()["norm.running_mean"], before));
  for (const auto& parameter : net->parameters()) EXPECT_FALSE(parameter.grad().defined());
  EXPECT_TRUE(net->is_training());
}

TEST(LayerProfile, SlicesHaveTheirBytesAndMessages) {
  // The first layer is split by output, the second by input, with a sum behind it.
  Sequential net;
  net->push_back("fc1", torch::nn::Linear(32, 64));
  net->push_back("fc2", torch::nn::Linear(64, 10));
  const ModelProfile profile = profile_alone(net, {torch::rand({16, 32}), torch::zeros({16}, torch::kLong), 16},
                                             {.seconds = 0.1, .tensor_ranks = {4, 2, 65}});
  ASSERT_EQ(profile.sliced.size(), 2u);  // 64 units do not go round 65 ranks
  EXPECT_EQ(profile.sliced[0].ranks, 2);
  EXPECT_EQ(profile.sliced[1].ranks, 4);
  const auto& halves = layers_of(profile, 2);
  ASSERT_EQ(halves.size(), 2u);
  EXPECT_EQ(halves[0].parameter_bytes, (32 * 32 + 32) * 4);
  EXPECT_EQ(halves[0].output_bytes, 32 * 4);
  EXPECT_EQ(profile.layers[0].output_bytes, 64 * 4);
  EXPECT_THAT(halves[0].forward_messages, ElementsAre());
  ASSERT_EQ(halves[1].forward_messages.size(), 1u);
  EXPECT_EQ(halves[1].forward_messages[0].kind, LayerMessage::Kind::allreduce);
  EXPECT_EQ(halves[1].forward_messages[0].bytes_per_sample, 10 * 4);
  EXPECT_EQ(halves[1].forward_messages[0].bytes, 0);
  EXPECT_THAT(halves[1].backward_messages, ElementsAre());
  EXPECT_GT(halves[1].forward.at(16), 0);
}

TEST(LayerProfile, AllRanksHaveTheSameProfileAndCluster) {
  std::mutex mutex;
  std::vector<std::string> profiles, clusters;
  run(parse_devices("3xcpu"), [&](Rank& rank) {
    const Sequential net = rank.in_turn([] { return small_net(); });
    const ModelProfile measured = profile(net, small_batch(8), cross_entropy, rank, quick);
    const Cluster cluster = measured_cluster(measured, rank);
    const std::lock_guard lock(mutex);
    profiles.push_back(to_json(measured));
    clusters.push_back(to_json(cluster));
  });
  EXPECT_EQ(profiles[0], profiles[1]);
  EXPECT_EQ(profiles[0], profiles[2]);
  EXPECT_EQ(clusters[0], clusters[1]);
  const ModelProfile measured = profile_from_json(profiles[0]);
  ASSERT_EQ(measured.speeds.size(), 3u);
  EXPECT_EQ(measured.speeds[0], 1);
  ASSERT_EQ(measured.contention.size(), 3u);
  EXPECT_EQ(measured.contention[0], 1);
  EXPECT_GE(measured.contention[2], measured.contention[1]);
  const Cluster cluster = cluster_from_json(clusters[0]);
  EXPECT_EQ(cluster.devices.size(), 3u);
  EXPECT_EQ(cluster.overlap, 0);
  for (const Link& link : {cluster.within.send, cluster.within.allreduce, cluster.within.allgather}) {
    EXPECT_GT(link.seconds(4e6), link.seconds(4e3));
    EXPECT_GT(link.bytes_per_second, 1e6);
    EXPECT_LT(link.latency, 0.1);
  }
  // The measurements are enough for a plan.
  const Plan plan = make_plan(measured, cluster, {.batch_size = 24});
  EXPECT_GT(plan.prediction.step_seconds, 0);
  EXPECT_EQ(plan.split.mesh.data * plan.split.mesh.pipeline * plan.split.mesh.tensor, 3);
}

TEST(LayerProfile, WhatCannotBeMeasuredIsAnError) {
  EXPECT_THAT(error_of([] { profile_alone(Sequential(), small_batch(2)); }), Refused());
  EXPECT_THAT(error_of([] { profile_alone(small_net(), small_batch(0)); }), Refused());
  EXPECT_THAT(error_of([] {
                profile_alone(small_net(), {torch::rand({4, 1, 9, 9}), torch::zeros({4}, torch::kLong), 4});
              }),
              Fails(Error::user_code));
}

TEST(CheckPlan, ANetOfTheSameLayersOnAsManyDevicesFits) {
  const Sequential net = small_net();
  ModelProfile measured = profile_alone(net, small_batch(4));
  measured.model = "small";
  measured.options = "kernel 3";
  Cluster cluster;
  cluster.devices.resize(2);
  cluster.devices_per_node = 2;
  Plan plan = make_plan(measured, cluster, {.batch_size = 8, .data = false, .tensor = false});
  EXPECT_EQ(error_of([&] { check_plan(plan, net, 2); }), "(no error)");
  EXPECT_EQ(error_of([&] { check_plan(plan_from_json(to_json(plan)), net, 2); }), "(no error)");
  EXPECT_THAT(error_of([&] { check_plan(plan, net, 3); }), Refused());

  Sequential wider = small_net();
  Sequential other;
  other->push_back("conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 8, 3)));
  EXPECT_THAT(error_of([&] { check_plan(plan, other, 2); }), Refused());
  wider->push_back("more", torch::nn::ReLU());
  EXPECT_THAT(error_of([&] { check_plan(plan, wider, 2); }), Refused());
  plan.split.cuts = {5};
  EXPECT_THAT(error_of([&] { check_plan(plan, net, 2); }), Refused());
}

// Its layers have the same parameters, and others' times and memory.
TEST(CheckPlan, ANetForImagesOfAnotherSizeDoesNotFit) {
  const auto net_for = [](int64_t size) { return make_model({.name = "resnet18", .width = 0.05, .image_size = size}); };
  const Plan plan{.model = "resnet18",
                  .layers = model_signature(net_for(32)),
                  .batch_size = 8,
                  .split = {.mesh = {.pipeline = 2}, .cuts = {4}}};
  EXPECT_EQ(error_of([&] { check_plan(plan, net_for(32), 2); }), "(no error)");
  EXPECT_THAT(error_of([&] { check_plan(plan, net_for(40), 2); }), Refused());
  EXPECT_THAT(error_of([&] { check_plan(plan, net_for(0), 2); }), Refused());
}

}  // namespace layer_profile_test
