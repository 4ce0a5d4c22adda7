// Labels: simulated long thorough
// Every way to train, on lists of simulated GPUs, on the default stream and on streams of the ranks' own: the losses of
// as many CPU ranks, no report of the device, and no wait of the host in a step. SIMULATED_DELAY_US holds tasks up.
// What this prints is the table of docs/results. With NCCL_MULTI_RANK_GPU_ENABLE ranks that share a GPU go over NCCL,
// and have streams of their own either way.
#include <c10/core/StreamGuard.h>
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/data/data.hpp>
#include <lockstep/data_parallel/all.hpp>
#include <lockstep/devices/device_info.hpp>
#include <lockstep/lab/half_precision_hook.hpp>
#include <lockstep/lab/local_sgd.hpp>
#include <lockstep/lab/power_sgd.hpp>
#include <lockstep/models/models.hpp>
#include <lockstep/split/split_model.hpp>
#include <lockstep/trainer/train_options.hpp>

#include "devices/device_streams.hpp"
#include "support/simulated_device.hpp"

#include <algorithm>
#include <barrier>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace schemes_test {

using namespace lockstep;
using torch::nn::Sequential;

constexpr int64_t kBatch = 8;  // samples

struct Scheme {
  std::string name;
  ModelSplit split = {.mesh = {.data = 0}};  // 0: as many as there are ranks
  std::function<std::shared_ptr<CommunicationHook>()> hook = {};
  int zero_stage = 0;
  int64_t grain = 0;
  int64_t average_every = 0;  // local SGD
  bool sync_batchnorm = false;
};

const std::vector<Scheme>& schemes() {
  static const std::vector<Scheme> all = {
      {.name = "data"},
      {.name = "data, bfloat16 gradients",
       .hook = [] { return std::make_shared<HalfPrecisionHook>(torch::kBFloat16); }},
      {.name = "data, PowerSGD", .hook = [] { return std::make_shared<PowerSgdHook>(); }},
      {.name = "data, grains of 2", .grain = 2},
      {.name = "data, SyncBatchNorm", .sync_batchnorm = true},
      {.name = "ZeRO 1, AdamW", .zero_stage = 1},
      {.name = "ZeRO 2, AdamW", .zero_stage = 2},
      {.name = "ZeRO 3, AdamW", .zero_stage = 3},
      {.name = "local SGD, every 2", .average_every = 2},
      {.name = "tensor", .split = {.mesh = {.data = 1, .tensor = 0}}},
      {.name = "pipeline, 4 microbatches", .split = {.mesh = {.data = 1, .pipeline = 0}, .microbatches = 4}},
      {.name = "mesh 2 x 2 x 1, 4 microbatches", .split = {.mesh = {.data = 2, .pipeline = 2}, .microbatches = 4}},
      {.name = "mesh 2 x 1 x 2", .split = {.mesh = {.data = 2, .tensor = 2}}},
      {.name = "ZeRO 3, AdamW, grains of 2", .zero_stage = 3, .grain = 2},
  };
  return all;
}

// Its split for so many ranks; none if it needs others.
std::optional<ModelSplit> split_for(const Scheme& scheme, int ranks) {
  ModelSplit split = scheme.split;
  for (int* const length : {&split.mesh.data, &split.mesh.pipeline, &split.mesh.tensor}) {
    if (*length > 0) continue;
    if (ranks == 1 && length != &split.mesh.data) return std::nullopt;
    *length = ranks;
  }
  if (split.mesh.size() != ranks) return std::nullopt;
  return split;
}

// In float64 the device's sums are the CPU's to the bit.
Sequential make_net(bool with_batchnorm) {
  torch::manual_seed(1);
  Sequential net;
  if (with_batchnorm) {
    net = Sequential(torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 4, 5).stride(3)), torch::nn::BatchNorm2d(4),
                     torch::nn::ReLU(), torch::nn::Flatten(), torch::nn::Linear(256, 10));
  } else {
    net = make_model({.name = "mlp", .width = 0.0625}, /*seed=*/1);
  }
  net->to(torch::kDouble);
  return net;
}

struct Trained {
  double loss = 0;  // loss of the last epoch
  int64_t host_waits = 0, late_waits = 0, launches = 0;
};

// Two epochs of `steps` steps. Counts are those of the second epoch, of all ranks together.
Trained train(const Scheme& scheme, const ModelSplit& split, const Devices& devices, bool own_streams, int64_t steps) {
  const Dataset data = synthetic_images(steps * kBatch, 1).train;
  Trained trained;
  std::barrier everybody(static_cast<std::ptrdiff_t>(devices.size()));  // NCCL's own would let hosts wait
  run(devices, [&](Rank& rank) {
    const bool on_demand = rank.device().is_cuda() && std::getenv("NCCL_MULTI_RANK_GPU_ENABLE") != nullptr;
    if (on_demand && rank.world_size() > 1) EXPECT_EQ(rank.backend().getBackendName(), "nccl");
    c10::OptionalStreamGuard stream;
    if (own_streams) stream.reset_stream(stream_beside(rank.device()));
    auto whole = rank.in_turn([&] { return make_net(scheme.sync_batchnorm); });
    if (scheme.sync_batchnorm) convert_sync_batchnorm(*whole, rank);
    SplitModel net(whole, rank, split,
                   {.average = scheme.average_every == 0,
                    .hook = scheme.hook ? scheme.hook() : nullptr,
                    .sharded = static_cast<Sharded>(scheme.zero_stage)});
    Optimizer optimizer(net, [&](auto groups) -> std::unique_ptr<torch::optim::Optimizer> {
      if (scheme.zero_stage == 0) return std::make_unique<torch::optim::SGD>(groups, torch::optim::SGDOptions(0.05));
      return std::make_unique<torch::optim::AdamW>(groups, torch::optim::AdamWOptions(1e-3));
    });
    std::optional<LocalSgd> local;
    if (scheme.average_every > 0) local.emplace(whole->parameters(), rank, LocalSgdOptions{scheme.average_every});

    for (int epoch = 1; epoch <= 2; ++epoch) {
      everybody.arrive_and_wait();
      const Trained before{0, lockstep::simulated::host_waits(), lockstep::simulated::late_waits(),
                           lockstep::simulated::launches()};
      everybody.arrive_and_wait();
      torch::Tensor sum = torch::zeros({}, torch::dtype(torch::kDouble).device(rank.device()));
      for (auto& batch : batches(data, {.size = kBatch, .epoch = epoch, .grain = scheme.grain}, net.mesh().data())) {
        batch.x = batch.x.to(torch::kDouble);
        optimizer.zero_grad();
        Loss loss = net.loss(batch, torch::nn::functional::cross_entropy);
        loss.backward();
        sum += loss.value() * batch.size();
        optimizer.step();
        if (local) local->step();
      }
      everybody.arrive_and_wait();
      if (rank.index() == 0) {
        trained = {0, lockstep::simulated::host_waits() - before.host_waits,
                   lockstep::simulated::late_waits() - before.late_waits,
                   lockstep::simulated::launches() - before.launches};
      }
      everybody.arrive_and_wait();
      const double loss = net.mesh().data().mean(sum.item<double>() / (steps * kBatch), 1) * split.mesh.data;
      if (rank.index() == 0) trained.loss = loss;
    }
  });
  return trained;
}

class Schemes : public testing::TestWithParam<size_t> {};
INSTANTIATE_TEST_SUITE_P(All, Schemes, testing::Range<size_t>(0, schemes().size()));

TEST_P(Schemes, TrainAsOnCpusWithoutAReport) {
  const Scheme& scheme = schemes()[GetParam()];
  std::map<int, double> losses_on_cpus;
  for (const bool own_streams : {false, true}) {
    std::cout << "| " << scheme.name << " | " << (own_streams ? "own" : "default") << " |";
    for (const std::vector<int>& indices : {std::vector<int>{0}, {0, 1}, {0, 0}, {0, 0, 1}, {0, 1, 2, 3}}) {
      const auto ranks = static_cast<int>(indices.size());
      const auto split = split_for(scheme, ranks);
      if (!split) {
        std::cout << " |";
        continue;
      }
      Devices devices;
      for (const int index : indices) devices.emplace_back(c10::kCUDA, static_cast<c10::DeviceIndex>(index));
      if (!losses_on_cpus.contains(ranks)) {
        losses_on_cpus[ranks] = train(scheme, *split, Devices(ranks, c10::kCPU), false, 6).loss;
      }
      // In both second epochs the optimizers' options are compared once, in step 8.
      const Trained four = train(scheme, *split, devices, own_streams, 4);
      const Trained six = train(scheme, *split, devices, own_streams, 6);
      const std::string where = scheme.name + " on " + to_string(devices) + (own_streams ? ", own streams" : "");
      EXPECT_EQ(six.loss, losses_on_cpus[ranks]) << where;
      EXPECT_EQ(six.host_waits, four.host_waits) << where;
      EXPECT_EQ(six.late_waits, four.late_waits) << where;
      EXPECT_THAT(lockstep::simulated::take_reports(), testing::IsEmpty()) << where;
      std::cout << ' ' << static_cast<double>(six.launches - four.launches) / 2 << " |";
    }
    std::cout << std::endl;
  }
}

}  // namespace schemes_test
