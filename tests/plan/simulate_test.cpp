// Pipelines played event by event, and the cost model around them, against formulas.
#include "plan/simulate.hpp"

#include <gmock/gmock.h>
#include <lockstep/base/error.hpp>
#include <lockstep/plan/plan.hpp>

#include <algorithm>
#include <chrono>
#include <numeric>
#include <vector>

#include "support/error_of.hpp"
#include "support/planned_nets.hpp"

namespace simulate_test {

using namespace lockstep;
using testing::AllOf;
using testing::DoubleNear;
using testing::ElementsAre;

constexpr double f = 1, b = 2;

PipelineRun equal_stages(PipelineSchedule schedule, int ranks, int microbatches, int stages_per_rank = 1) {
  PipelineRun run;
  run.schedule = schedule;
  run.ranks = ranks;
  run.stages_per_rank = stages_per_rank;
  run.microbatches = microbatches;
  run.stages.assign(static_cast<size_t>(ranks * stages_per_rank),
                    {.forward = f / stages_per_rank, .backward = b / stages_per_rank});
  return run;
}

double idle_share(const PipelineTimes& times) {
  return 1 - std::accumulate(times.busy.begin(), times.busy.end(), 0.0) / static_cast<double>(times.busy.size()) /
                 times.seconds;
}

TEST(Simulation, EqualStagesTakeWhatTheFormulaSays) {
  for (const PipelineSchedule schedule : {PipelineSchedule::gpipe, PipelineSchedule::one_f_one_b}) {
    for (const int ranks : {1, 2, 3, 4, 8}) {
      for (const int microbatches : {1, 2, 5, 8, 32}) {
        const PipelineTimes times = simulate(equal_stages(schedule, ranks, microbatches));
        EXPECT_NEAR(times.seconds, (microbatches + ranks - 1) * (f + b), 1e-9);
        EXPECT_NEAR(idle_share(times), (ranks - 1.0) / (microbatches + ranks - 1), 1e-9);
        EXPECT_NEAR(idle_share(times), ideal_idle_share(schedule, ranks, 1, microbatches), 1e-9);
      }
    }
  }
}

TEST(Simulation, InterleavedStagesAreIdleForLess) {
  for (const int ranks : {2, 4}) {
    for (const int stages_per_rank : {2, 3}) {
      for (const int rounds : {1, 2, 8}) {
        const int microbatches = ranks * rounds;
        const PipelineTimes times =
            simulate(equal_stages(PipelineSchedule::interleaved, ranks, microbatches, stages_per_rank));
        EXPECT_NEAR(idle_share(times),
                    ideal_idle_share(PipelineSchedule::interleaved, ranks, stages_per_rank, microbatches), 1e-9);
      }
    }
  }
}

TEST(Simulation, TheSlowestStageSetsThePace) {
  PipelineRun run = equal_stages(PipelineSchedule::one_f_one_b, 3, 40);
  run.stages[1] = {.forward = 5, .backward = 10};
  EXPECT_THAT(simulate(run).seconds, AllOf(testing::Ge(40 * 15), testing::Le(40 * 15 + 2 * 2 * (f + b))));
}

TEST(Simulation, MessagesDelayWhatWaitsForThem) {
  PipelineRun run = equal_stages(PipelineSchedule::gpipe, 2, 1);
  run.stages[0].send_forward = 0.25;
  run.stages[1].send_backward = 0.5;
  EXPECT_NEAR(simulate(run).seconds, 2 * (f + b) + 0.75, 1e-9);
  run.microbatches = 4;  // where a link is slower than the computing, all messages wait for each other
  run.stages[0].send_forward = 10;
  EXPECT_NEAR(simulate(run).seconds, f + 4 * 10 + f + 4 * b + 0.5 + b, 1e-9);
}

TEST(Simulation, CollectivesHoldTheirRankButDoNotCountAsBusy) {
  PipelineRun run = equal_stages(PipelineSchedule::gpipe, 1, 3);
  run.stages[0].forward_messages = 0.25;
  run.stages[0].backward_messages = 0.5;
  const PipelineTimes times = simulate(run);
  EXPECT_NEAR(times.seconds, 3 * (f + b + 0.75), 1e-9);
  EXPECT_NEAR(times.busy[0], 3 * (f + b), 1e-9);
}

TEST(Simulation, RanksThatShareCoresTakeTurns) {
  // Two cores: the work of all ranks, at twice one core's rate, but for the moments when fewer than two compute.
  PipelineRun run = equal_stages(PipelineSchedule::gpipe, 4, 1);
  run.node = {0, 0, 0, 0};
  run.slowdown = [](double computing) { return std::max(1.0, computing / 2); };
  EXPECT_NEAR(simulate(run).seconds, 4 * (f + b), 1e-9);  // one after the other
  run.microbatches = 100;
  EXPECT_NEAR(simulate(run).seconds, 400 * (f + b) / 2, 0.02 * 200 * (f + b));
  run.node = {0, 0, 1, 1};  // two nodes have four cores
  EXPECT_NEAR(simulate(run).seconds, 103 * (f + b), 1e-6);
  run.copies = 2;  // two pipelines share them
  EXPECT_NEAR(simulate(run).seconds, 200 * (f + b), 0.03 * 200 * (f + b));
}

TEST(CostModel, LinksAndRings) {
  const Link link{.latency = 1e-3, .bytes_per_second = 1e9};
  EXPECT_DOUBLE_EQ(link.seconds(2e9), 2.001);
  for (const int k : {2, 4, 7}) {
    const double n = 3e9;
    EXPECT_NEAR(allreduce_seconds(link, k, n), 2 * (k - 1) * 1e-3 + 2.0 * (k - 1) / k * n / 1e9, 1e-9);
    EXPECT_NEAR(allgather_seconds(link, k, n), (k - 1) * 1e-3 + (k - 1.0) / k * n / 1e9, 1e-9);
  }
  EXPECT_EQ(allreduce_seconds(link, 1, 1e9), 0);
  const Link late{.latency = 1e-3, .bytes_per_second = 1e9, .start = 5e-3};  // once, whatever the steps
  EXPECT_NEAR(allreduce_seconds(late, 4, 0), 5e-3 + 6e-3, 1e-12);
  EXPECT_NEAR(allgather_seconds(late, 4, 0), 5e-3 + 3e-3, 1e-12);
  EXPECT_EQ(allgather_seconds(late, 1, 1e9), 0);
}

Plan plan_of(MeshShape mesh, int64_t batch_size, int microbatches, std::vector<int64_t> cuts = {}) {
  Plan plan;
  plan.split.mesh = mesh;
  plan.batch_size = batch_size;
  plan.split.microbatches = microbatches;
  plan.split.cuts = std::move(cuts);
  return plan;
}

TEST(CostModel, DataParallelismTakesTheLargestPartAndTheRingThatDoesNotHide) {
  const ModelProfile profile = equal_layers(4);  // 12 ms per sample, 4 MB
  Cluster cluster = ideal_cluster(3);
  cluster.within.allreduce = {.latency = 1e-3, .bytes_per_second = 1e8};
  const Plan plan = plan_of({.data = 3}, 100, 1);
  cluster.overlap = 0;
  const double ring = 2 * 2 * 1e-3 + 2 * 2.0 / 3 * 4e6 / 1e8;
  const Prediction alone = predict(profile, cluster, plan);
  EXPECT_NEAR(alone.step_seconds, 34 * 0.012 + ring, 1e-9);  // ⌈100 / 3⌉ samples
  EXPECT_NEAR(alone.bytes_sent(), 2 * 2.0 / 3 * 4e6, 1e-3);
  EXPECT_NEAR(alone.idle_share(), ring / alone.step_seconds, 1e-9);

  // 20 MB in five buckets hide behind backward, as far as it is long enough, but for the last.
  const ModelProfile larger = equal_layers(20);
  const double compute = 34 * 0.060, bucket = 2 * 2 * (1e-3 + 4e6 / 3 / 1e8);
  cluster.overlap = 0.1;  // backward takes 34 * 40 ms
  EXPECT_NEAR(predict(larger, cluster, plan).step_seconds, compute + 5 * bucket - 0.136, 1e-9);
  cluster.overlap = 1;
  EXPECT_NEAR(predict(larger, cluster, plan).step_seconds, compute + bucket, 1e-9);
}

TEST(CostModel, ContentionAndSpeedCount) {
  const ModelProfile profile = equal_layers(2);
  Cluster cluster = ideal_cluster(4);
  cluster.contention = {1, 1.25, 1.75};
  EXPECT_DOUBLE_EQ(cluster.slowdown(1), 1);
  EXPECT_DOUBLE_EQ(cluster.slowdown(2), 1.25);
  EXPECT_DOUBLE_EQ(cluster.slowdown(2.5), 1.5);
  EXPECT_DOUBLE_EQ(cluster.slowdown(6), 3.5);  // beyond what is known in proportion
  const double alone = 8 * 0.006;
  EXPECT_NEAR(predict(profile, cluster, plan_of({.data = 2}, 16, 1)).step_seconds, alone * 1.25, 1e-9);
  EXPECT_NEAR(predict(profile, cluster, plan_of({.data = 4}, 32, 1)).step_seconds, alone * 1.75 * 4 / 3, 1e-9);
  cluster.devices_per_node = 2;
  EXPECT_NEAR(predict(profile, cluster, plan_of({.data = 4}, 32, 1)).step_seconds, alone * 1.25, 1e-9);
  cluster.devices[1].speed = 0.5;  // all wait for it
  EXPECT_NEAR(predict(profile, cluster, plan_of({.data = 4}, 32, 1)).step_seconds, alone * 1.25 * 2, 1e-9);
}

TEST(CostModel, APipelineIsItsSimulation) {
  const ModelProfile profile = equal_layers(4);
  Cluster cluster = ideal_cluster(4);
  const double f_ = 8 * 1e-3, b_ = 8 * 2e-3;  // 64 samples in 8 microbatches, a layer each
  const Prediction ideal = predict(profile, cluster, plan_of({.pipeline = 4}, 64, 8, {1, 2, 3}));
  EXPECT_NEAR(ideal.step_seconds, (8 + 3) * (f_ + b_), 1e-9);
  EXPECT_NEAR(ideal.idle_share(), 3.0 / 11, 1e-9);
  // The first and the last send in one direction, those between in both: 1 kB per sample.
  ASSERT_EQ(ideal.ranks.size(), 4u);
  EXPECT_NEAR(ideal.ranks[0].bytes_sent, 64e3, 1e-6);
  EXPECT_NEAR(ideal.ranks[1].bytes_sent, 128e3, 1e-6);
  // 1F1B holds 4, 3, 2, 1 microbatches; parameters and gradients; the batch.
  for (int p = 0; p < 4; ++p) {
    const double input = p == 0 ? 0 : 1e3;
    EXPECT_NEAR(ideal.ranks[static_cast<size_t>(p)].memory_bytes, 2e6 + 64 * 500 + (4 - p) * 8 * (3e3 + input), 1e-6);
  }
  Plan plan = plan_of({.pipeline = 4}, 64, 8, {1, 2, 3});
  plan.split.schedule = PipelineSchedule::gpipe;
  EXPECT_NEAR(predict(profile, cluster, plan).memory_bytes(), 2e6 + 64 * 500 + 64 * 4e3, 1e-6);
  plan.split.recompute = true;
  const Prediction recomputed = predict(profile, cluster, plan);
  EXPECT_NEAR(recomputed.step_seconds, (8 + 3) * (2 * f_ + b_), 1e-9);
  EXPECT_NEAR(recomputed.memory_bytes(), 2e6 + 64 * 500 + 64 * 1e3 + 8 * 3e3, 1e-6);
  EXPECT_NEAR(predict(profile, cluster, plan, {.state_bytes_per_parameter_byte = 2}).memory_bytes(),
              recomputed.memory_bytes() + 2e6, 1e-6);
}

// While a layer runs, what those behind it keep is not there: of the workspaces only one counts.
TEST(CostModel, TheWorkspaceThatNeedsMostCounts) {
  ModelProfile profile = equal_layers(3);
  const Cluster cluster = ideal_cluster(1);
  const auto memory = [&] { return predict(profile, cluster, plan_of({}, 10, 1)).memory_bytes(); };
  const double without = memory();
  EXPECT_NEAR(without, 2 * 3e6 + 10 * 500 + 10 * 3 * 3e3, 1e-6);
  profile.layers[2].workspace_bytes = 2e3;
  profile.layers[2].fixed_workspace_bytes = 1e3;
  EXPECT_NEAR(memory(), without + 10 * 2e3 + 1e3, 1e-6);
  profile.layers[0].workspace_bytes = 8e3;  // 6 kB of them where the others' 3 kB each were
  EXPECT_NEAR(memory(), without + 10 * 2e3 + 1e3, 1e-6);
  profile.layers[0].workspace_bytes = 9e3;
  EXPECT_NEAR(memory(), without + 10 * 3e3, 1e-6);
  profile.loss.saved_bytes = 500;
  EXPECT_NEAR(memory(), without + 10 * 500 + 10 * 2.5e3, 1e-6);
}

TEST(CostModel, SlicesHaveTheirOwnTimesAndMessages) {
  ModelProfile profile = equal_layers(2);
  SlicedLayers halves{2, profile.layers};
  for (auto& layer : halves.layers) {
    layer.parameter_bytes /= 2;
    layer.forward = proportional(0.5e-3);
    layer.backward = proportional(1e-3);
  }
  halves.layers[0].output_bytes /= 2;
  halves.layers[1].forward_messages = {{LayerMessage::Kind::allreduce, 0, 1e3}};
  halves.layers[0].backward_messages = {{LayerMessage::Kind::allgather, 100, 500}};
  profile.sliced.push_back(halves);
  Cluster cluster = ideal_cluster(4);
  cluster.within.allreduce = {.latency = 1e-3, .bytes_per_second = 1e6};
  cluster.within.allgather = {.latency = 2e-3, .bytes_per_second = 1e6};
  const Prediction split = predict(profile, cluster, plan_of({.tensor = 2}, 10, 1));
  const double sums = 2 * (1e-3 + 10e3 / 2 / 1e6), gathers = 2e-3 + 5.1e3 / 2 / 1e6;
  EXPECT_NEAR(split.step_seconds, 10 * 3e-3 + sums + gathers, 1e-9);
  EXPECT_NEAR(split.bytes_sent(), 10e3 + 5.1e3 / 2, 1e-6);
  EXPECT_NEAR(split.ranks[0].parameter_bytes, 1e6, 1e-6);

  // Where a cut finds activations in slices, each rank sends its own, and gets that slice's gradient.
  cluster.within.send = {.latency = 1e-3, .bytes_per_second = 1e6};
  const Prediction both = predict(profile, cluster, plan_of({.pipeline = 2, .tensor = 2}, 10, 1, {1}));
  EXPECT_NEAR(both.step_seconds, 10 * 3e-3 + sums + gathers + 2 * (1e-3 + 10e3 / 2 / 1e6), 1e-9);
  EXPECT_THAT(error_of([&] { predict(profile, cluster, plan_of({.tensor = 4}, 10, 1)); }), Refused());
}

TEST(CostModel, LinksBetweenNodesCountWhereAnAxisCrossesThem) {
  ModelProfile profile = equal_layers(2);
  Cluster cluster = ideal_cluster(4);
  cluster.devices_per_node = 2;
  cluster.overlap = 0;
  cluster.between.allreduce.latency = 1;
  cluster.between.send.latency = 1;
  const double compute = 8 * 0.006;
  EXPECT_NEAR(predict(profile, cluster, plan_of({.data = 2}, 16, 1)).step_seconds, compute, 1e-9);
  EXPECT_NEAR(predict(profile, cluster, plan_of({.data = 4}, 32, 1)).step_seconds, compute + 2 * 3, 1e-9);
  // The stages of a pipeline are neighbours; replicas of it are not.
  EXPECT_NEAR(predict(profile, cluster, plan_of({.pipeline = 2}, 8, 1, {1})).step_seconds, compute, 1e-9);
  EXPECT_NEAR(predict(profile, cluster, plan_of({.data = 2, .pipeline = 2}, 16, 1, {1})).step_seconds, compute + 2,
              1e-9);
}

TEST(CostModel, TimesBetweenMeasuredSizesAreInterpolated) {
  const TimeCurve curve{{{1, 5.0}, {4, 8.0}, {8, 16.0}}};
  EXPECT_EQ(curve.at(0), 0);
  EXPECT_EQ(curve.at(0.5), 5);
  EXPECT_EQ(curve.at(1), 5);
  EXPECT_DOUBLE_EQ(curve.at(2), 6);
  EXPECT_DOUBLE_EQ(curve.at(4), 8);
  EXPECT_DOUBLE_EQ(curve.at(6), 12);
  EXPECT_DOUBLE_EQ(curve.at(16), 32);
  EXPECT_DOUBLE_EQ((TimeCurve{{{4, 8.0}}}.at(8)), 16);
}

TEST(CostModel, AThousandDevicesTakeSeconds) {
  ModelProfile profile = equal_layers(30);
  for (const int ranks : {2, 4, 8}) {
    SlicedLayers slices{ranks, profile.layers};
    for (auto& layer : slices.layers) {
      layer.forward = proportional(1e-3 / ranks);
      layer.backward = proportional(2e-3 / ranks);
      layer.forward_messages = {{LayerMessage::Kind::allreduce, 0, 1e3}};
    }
    profile.sliced.push_back(slices);
  }
  Cluster cluster = ideal_cluster(1024);
  cluster.devices_per_node = 8;
  cluster.within = {.send = {1e-6, 1e11}, .allreduce = {1e-6, 1e11}, .allgather = {1e-6, 1e11}};
  cluster.between = {.send = {1e-5, 1e10}, .allreduce = {1e-5, 1e10}, .allgather = {1e-5, 1e10}};
  const auto start = std::chrono::steady_clock::now();
  const auto plans = candidate_plans(profile, cluster, {.batch_size = 8192});
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(30));
  EXPECT_GT(plans.size(), 20u);
  for (size_t i = 1; i < plans.size(); ++i) {
    EXPECT_LE(plans[i - 1].prediction.step_seconds, plans[i].prediction.step_seconds);
    EXPECT_EQ(plans[i].split.mesh.data * plans[i].split.mesh.pipeline * plans[i].split.mesh.tensor, 1024);
  }
  EXPECT_LE(best_plan(plans).prediction.step_seconds, 1.01 * plans.front().prediction.step_seconds);
}

}  // namespace simulate_test
