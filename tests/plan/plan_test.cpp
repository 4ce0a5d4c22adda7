// The plans that are chosen, and the files of plans, clusters and profiles.
#include <gmock/gmock.h>
#include <lockstep/base/error.hpp>
#include <lockstep/plan/plan.hpp>
#include <nlohmann/json.hpp>

#include <functional>
#include <string>
#include <vector>

#include "support/error_of.hpp"
#include "support/planned_nets.hpp"
#include "support/scratch_folder.hpp"

namespace plan_test {

using namespace lockstep;
using nlohmann::json;
using testing::ElementsAre;

TEST(MakePlan, DataParallelWhereLittleIsSent) {
  const Plan plan = make_plan(equal_layers(4), ideal_cluster(4), {.batch_size = 64, .devices = "4xcpu"});
  EXPECT_EQ(plan.split.mesh, (MeshShape{.data = 4}));
  EXPECT_THAT(plan.split.cuts, ElementsAre());
  EXPECT_EQ(plan.model, "equal");
  EXPECT_EQ(plan.devices, "4xcpu");
  EXPECT_EQ(plan.layers.size(), 4u);
  EXPECT_NEAR(plan.prediction.step_seconds, 16 * 0.012, 1e-9);
}

TEST(MakePlan, APipelineWhereGradientsAreLargeAndLinksAreSlow) {
  ModelProfile profile = equal_layers(4);
  for (auto& layer : profile.layers) layer.parameter_bytes = 1e9;
  Cluster cluster = ideal_cluster(4);
  cluster.within = {.send = {1e-6, 1e9}, .allreduce = {1e-6, 1e9}, .allgather = {1e-6, 1e9}};
  const Plan plan = make_plan(profile, cluster, {.batch_size = 64});
  EXPECT_EQ(plan.split.mesh, (MeshShape{.pipeline = 4}));
  EXPECT_THAT(plan.split.cuts, ElementsAre(1, 2, 3));
  EXPECT_EQ(plan.split.schedule, PipelineSchedule::one_f_one_b);  // 1F1B is as fast as GPipe, with less memory
  EXPECT_EQ(plan.split.microbatches, 64);
  const Plan two = make_plan(profile, cluster, {.batch_size = 64, .pipeline = false});
  EXPECT_EQ(two.split.mesh, (MeshShape{.data = 4}));
  EXPECT_GT(two.prediction.step_seconds, plan.prediction.step_seconds);
}

TEST(MakePlan, OverheadOfSmallMicrobatchesLimitsTheirNumber) {
  ModelProfile profile = equal_layers(2);
  for (auto& layer : profile.layers) {  // 2 ms whatever the size, and 0.1 ms per sample
    layer.forward = layer.backward = {{{1, 2.1e-3}, {1001, 102.1e-3}}};
  }
  const Plan plan = make_plan(profile, ideal_cluster(2), {.batch_size = 64, .data = false, .tensor = false});
  // (M + 1) (2 ms + 6.4 ms / M) is least at the square root of 3.2: 2 beats 1 and 3.
  EXPECT_EQ(plan.split.microbatches, 2);
  EXPECT_NEAR(plan.prediction.step_seconds, 3 * 2 * (2e-3 + 3.2e-3), 1e-9);
}

TEST(MakePlan, RecomputesWhereMemoryIsShortOnly) {
  ModelProfile profile = equal_layers(4);
  Cluster cluster = ideal_cluster(2);
  PlanOptions options{.batch_size = 64, .data = false, .tensor = false};
  EXPECT_FALSE(make_plan(profile, cluster, options).split.recompute);
  for (auto& layer : profile.layers) layer.saved_bytes = 5e6;
  for (auto& device : cluster.devices) device.memory_bytes = 24e6;  // 4 MB of them for parameters and gradients
  const Plan plan = make_plan(profile, cluster, options);
  EXPECT_TRUE(plan.split.recompute);
  EXPECT_LE(plan.prediction.memory_bytes(), 24e6);
  // Also a device of its own, whose microbatches are accumulated one after the other.
  options = {.batch_size = 64, .pipeline = false, .tensor = false};
  for (auto& layer : profile.layers) layer.saved_bytes = 1e6;
  for (auto& device : cluster.devices) device.memory_bytes = 30e6;
  const Plan accumulated = make_plan(profile, cluster, options);
  EXPECT_EQ(accumulated.split.mesh, (MeshShape{.data = 2}));
  EXPECT_EQ(accumulated.split.microbatches, 8);  // 4 samples of 4 MB beside 8 MB; 8 would be too many
}

TEST(MakePlan, UnequalDevicesGetUnequalStages) {
  Cluster cluster = ideal_cluster(2);
  cluster.devices[1].speed = 3;
  const Plan plan =
      make_plan(equal_layers(8), cluster,
                {.batch_size = 64, .schedules = {PipelineSchedule::one_f_one_b}, .data = false, .tensor = false});
  EXPECT_EQ(plan.split.mesh, (MeshShape{.pipeline = 2}));
  EXPECT_THAT(plan.split.cuts, ElementsAre(2));
}

TEST(MakePlan, WhatCannotBeIsAnError) {
  Cluster cluster = ideal_cluster(2);
  for (auto& device : cluster.devices) device.memory_bytes = 3e6;
  EXPECT_THAT(error_of([&] { make_plan(equal_layers(4), cluster, {}); }), Refused());
  EXPECT_THAT(error_of([&] { make_plan(equal_layers(1), ideal_cluster(7), {.batch_size = 3}); }), Refused());
  EXPECT_THAT(error_of([&] { make_plan(equal_layers(1), ideal_cluster(1), {.batch_size = 0}); }), Refused());
  EXPECT_THAT(error_of([&] { make_plan({}, ideal_cluster(1), {}); }), Refused());
  EXPECT_THAT(error_of([] { best_plan({}); }), Refused());
}

TEST(Predict, RefusesPlansThatDoNotFit) {
  const auto error = [](const std::function<void(Plan&)>& change) {
    Plan plan;
    plan.batch_size = 8;
    plan.split.mesh.pipeline = 2;
    plan.split.cuts = {2};
    change(plan);
    return error_of([&] { predict(equal_layers(4), ideal_cluster(2), plan); });
  };
  EXPECT_EQ(error([](Plan&) {}), "(no error)");
  EXPECT_THAT(error([](Plan& plan) { plan.split.cuts = {}; }), Refused());
  EXPECT_THAT(error([](Plan& plan) { plan.split.cuts = {4}; }), Refused("cuts"));
  EXPECT_THAT(error([](Plan& plan) { plan.split.cuts = {0}; }), Refused("cuts"));
  EXPECT_THAT(error([](Plan& plan) { plan.split.mesh.pipeline = 5; }), Refused("mesh"));
  EXPECT_THAT(error([](Plan& plan) { plan.split.mesh.data = 2; }), Refused());
  EXPECT_THAT(error([](Plan& plan) { plan.split.microbatches = 0; }), Refused("microbatches"));
  EXPECT_THAT(error([](Plan& plan) { plan.split.stages_per_rank = 2; }), Refused());
}

Plan interesting_plan() {
  ModelProfile profile = equal_layers(8);
  profile.options = "width=0.5";
  Plan plan =
      make_plan(profile, ideal_cluster(2),
                {.batch_size = 64, .schedules = {PipelineSchedule::interleaved}, .data = false, .devices = "cpu,cpu"});
  plan.split.recompute = true;
  return plan;
}

TEST(PlanJson, ComesBackAsItWas) {
  const Plan plan = interesting_plan();
  const Plan back = plan_from_json(to_json(plan));
  EXPECT_EQ(to_json(back), to_json(plan));
  EXPECT_EQ(back.model, "equal");
  EXPECT_EQ(back.options, "width=0.5");
  EXPECT_EQ(back.layers, plan.layers);
  EXPECT_EQ(back.split.mesh, (MeshShape{.pipeline = 2}));
  EXPECT_EQ(back.split.schedule, PipelineSchedule::interleaved);
  EXPECT_GE(back.split.stages_per_rank, 2);
  EXPECT_EQ(back.split.cuts, plan.split.cuts);
  EXPECT_TRUE(back.split.recompute);
  EXPECT_EQ(back.prediction.step_seconds, plan.prediction.step_seconds);
  EXPECT_EQ(back.prediction.ranks.size(), 2u);
  EXPECT_EQ(back.prediction.bytes_sent(), plan.prediction.bytes_sent());
  const ScratchFolder folder;
  folder.write("plan.json", to_json(plan));
  EXPECT_EQ(to_json(read_plan(folder / "plan.json")), to_json(plan));
}

TEST(PlanJson, WhatItDoesNotUnderstandIsAnErrorThatNamesTheKey) {
  const auto error = [](const std::function<void(json&)>& change) {
    json changed = json::parse(to_json(interesting_plan()));
    change(changed);
    return error_of([&] { plan_from_json(changed.dump()); });
  };
  EXPECT_EQ(error([](json&) {}), "(no error)");
  EXPECT_THAT(error([](json& plan) { plan["colour"] = 1; }), Refused("colour"));
  EXPECT_THAT(error([](json& plan) { plan["mesh"]["depth"] = 1; }), Refused("mesh.depth"));
  EXPECT_THAT(error([](json& plan) { plan.erase("cuts"); }), Refused("cuts"));
  EXPECT_THAT(error([](json& plan) { plan["cuts"][0] = 1.5; }), Refused("cuts[0]"));
  EXPECT_THAT(error([](json& plan) { plan["cuts"] = 3; }), Refused("cuts"));
  EXPECT_THAT(error([](json& plan) { plan["mesh"] = 3; }), Refused());
  EXPECT_THAT(error([](json& plan) { plan["mesh"]["data"] = 0; }), Refused("mesh.data"));
  EXPECT_THAT(error([](json& plan) { plan["microbatches"] = "many"; }), Refused("microbatches"));
  EXPECT_THAT(error([](json& plan) { plan["microbatches"] = 4294967296; }), Refused("microbatches"));
  EXPECT_THAT(error([](json& plan) { plan["schedule"] = "1f2b"; }), Refused("schedule"));
  EXPECT_THAT(error([](json& plan) { plan["prediction"]["ranks"][1]["busy_seconds"] = -1; }),
              Refused("prediction.ranks[1].busy_seconds"));
  EXPECT_THAT(error_of([] { plan_from_json("{"); }), Refused());
  EXPECT_THAT(error_of([] { plan_from_json("[]"); }), Refused());
  const ScratchFolder folder;
  EXPECT_THAT(error_of([&] { read_plan(folder / "none.json"); }), Fails(Error::file));
  folder.write("empty.json", "");
  EXPECT_THAT(error_of([&] { read_plan(folder / "empty.json"); }), Fails(Error::file));
}

const char* const described = R"({
  "devices": [{"count": 2, "speed": 2.5, "memory_bytes": 8e9}, {"count": 1}],
  "devices_per_node": 2,
  "within": {"latency": 1e-6, "bytes_per_second": 1e11, "allgather": {"latency": 3e-6, "bytes_per_second": 5e10, "start": 2e-6}},
  "between": {"latency": 1e-5, "bytes_per_second": 1e10},
  "contention": [1, 1.5],
  "overlap": 0.5
})";

TEST(ClusterJson, IsReadAndComesBack) {
  const Cluster cluster = cluster_from_json(described);
  ASSERT_EQ(cluster.devices.size(), 3u);
  EXPECT_EQ(cluster.devices[1].speed, 2.5);
  EXPECT_EQ(cluster.devices[1].memory_bytes, 8e9);
  EXPECT_EQ(cluster.devices[2].speed, 1);
  EXPECT_EQ(cluster.devices[2].memory_bytes, 0);
  EXPECT_EQ(cluster.node_of(1), 0);
  EXPECT_EQ(cluster.node_of(2), 1);
  EXPECT_EQ(cluster.within.allreduce.latency, 1e-6);
  EXPECT_EQ(cluster.within.allgather.latency, 3e-6);
  EXPECT_EQ(cluster.within.allgather.start, 2e-6);
  EXPECT_EQ(cluster.within.allreduce.start, 0);
  EXPECT_EQ(cluster.between.send.bytes_per_second, 1e10);
  EXPECT_EQ(cluster.overlap, 0.5);
  EXPECT_EQ(cluster.slowdown(2), 1.5);
  const std::string text = to_json(cluster);
  EXPECT_EQ(json::parse(text)["devices"].size(), 2u);  // equal devices stand together
  EXPECT_EQ(to_json(cluster_from_json(text)), text);
}

TEST(ClusterJson, WhatMakesNoSenseIsAnErrorThatNamesTheKey) {
  const auto error = [](const std::function<void(json&)>& change) {
    json changed = json::parse(described);
    change(changed);
    return error_of([&] { cluster_from_json(changed.dump()); });
  };
  EXPECT_EQ(error([](json&) {}), "(no error)");
  EXPECT_THAT(error([](json& c) { c["devices"] = json::array(); }), Refused());
  EXPECT_THAT(error([](json& c) { c["devices"][0]["count"] = 1024; }), Refused());
  EXPECT_THAT(error([](json& c) { c["devices"][0]["count"] = 0; }), Refused("devices[0].count"));
  EXPECT_THAT(error([](json& c) { c["devices"][0]["speed"] = 0; }), Refused());
  EXPECT_THAT(error([](json& c) { c["within"]["bytes_per_second"] = -1; }), Refused());
  EXPECT_THAT(error([](json& c) { c["within"].erase("latency"); }), Refused("within.latency"));
  EXPECT_THAT(error([](json& c) { c.erase("between"); }), Refused("between"));
  EXPECT_THAT(error([](json& c) { c["overlap"] = 2; }), Refused());
  EXPECT_THAT(error([](json& c) { c["contention"][0] = 0.5; }), Refused());
  EXPECT_THAT(error([](json& c) { c["gpus"] = 3; }), Refused("gpus"));
  EXPECT_EQ(error([](json& c) {  // one node needs no links between nodes
              c.erase("between");
              c.erase("devices_per_node");
            }),
            "(no error)");
}

TEST(ProfileJson, ComesBackAsItWas) {
  ModelProfile profile = equal_layers(2);
  profile.layers[0].forward_messages = {{LayerMessage::Kind::allgather, 5, 7}};
  profile.sliced.push_back({2, profile.layers});
  profile.update_seconds = 0.1;
  profile.speeds = {1, 1.5};
  profile.contention = {1, 1.25};
  profile.layers[1].fixed_workspace_bytes = 12;
  const ModelProfile back = profile_from_json(to_json(profile));
  EXPECT_EQ(to_json(back), to_json(profile));
  EXPECT_EQ(back.layers[1].forward.at(10), profile.layers[1].forward.at(10));
  EXPECT_EQ(back.layers[1].fixed_workspace_bytes, 12);
  EXPECT_EQ(back.sliced.at(0).layers.at(0).forward_messages.at(0).bytes_per_sample, 7);
  json changed = json::parse(to_json(profile));
  changed["sliced"][0]["layers"].erase(0);
  EXPECT_THAT(error_of([&] { profile_from_json(changed.dump()); }), Refused());
}

}  // namespace plan_test
