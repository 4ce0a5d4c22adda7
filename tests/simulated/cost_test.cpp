// Labels: simulated
// What a step of training costs a GPU's host, as numbers: how often the host waits, and how many kernels it
// launches. A change of one of these numbers may be right, but nobody should make it without knowing.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/data/data.hpp>
#include <lockstep/data_parallel/data_parallel.hpp>
#include <lockstep/models/fuse_layers.hpp>
#include <lockstep/models/gpt.hpp>
#include <lockstep/profile/layer_profile.hpp>
#include <lockstep/scratch/train_batch.hpp>
#include <lockstep/trainer/trainer.hpp>

#include "support/simulated_device.hpp"
#include "support/test_devices.hpp"
#include "trainer/rank_trainer.hpp"
#include "trainer/workload.hpp"

#include <cstdint>
#include <functional>
#include <ostream>
#include <string>
#include <vector>

namespace cost_test {

using lockstep::Devices;
using lockstep::gpus;
using lockstep::OptimizerKind;
using lockstep::Rank;
using lockstep::TrainOptions;

constexpr int64_t kBatch = 8;  // samples

struct Cost {
  int64_t host_waits = 0;  // for all that a GPU has to do
  int64_t late_waits = 0;  // for something behind which it has more to do
  int64_t launches = 0;

  static Cost now() {
    namespace simulated = lockstep::simulated;
    return {simulated::host_waits(), simulated::late_waits(), simulated::launches()};
  }
  Cost operator-(const Cost& other) const {
    return {host_waits - other.host_waits, late_waits - other.late_waits, launches - other.launches};
  }
  Cost operator/(int64_t steps) const {
    EXPECT_EQ(host_waits % steps, 0);
    EXPECT_EQ(late_waits % steps, 0);
    EXPECT_EQ(launches % steps, 0);
    return {host_waits / steps, late_waits / steps, launches / steps};
  }
  bool operator==(const Cost&) const = default;
  friend void PrintTo(const Cost& cost, std::ostream* out) {
    *out << "{" << cost.host_waits << ", " << cost.late_waits << ", " << cost.launches << "}";
  }
};

// The cost of a step, of all ranks together. An epoch's own cost is in both; what the first three steps find out is in
// neither.
Cost of_step(const std::function<Cost(int64_t steps)>& of_epoch) {
  return (of_epoch(5) - of_epoch(3)) / 2;
}

// The cost of a rank's second epoch, in which `epoch` does the work.
Cost of_second(Rank& rank, const std::function<void(int epoch)>& epoch) {
  epoch(1);
  rank.barrier();
  const Cost before = Cost::now();
  rank.barrier();
  epoch(2);
  rank.barrier();
  return Cost::now() - before;
}

lockstep::Task task_with(const TrainOptions& options, int64_t samples) {
  if (options.model.name != "gpt") return task_of(options, lockstep::synthetic_images(samples, kBatch));
  const auto tokens = torch::randint(0, 256, {samples, options.model.context}, torch::kLong);
  return {.name = "tokens",
          .module = [model = options.model] { return lockstep::make_model(model); },
          .criterion = lockstep::token_cross_entropy,
          .train = {{tokens, tokens}}};
}

Cost of_step(TrainOptions options) {
  options.batch.size = kBatch;
  options.epochs = 2;
  return of_step([&](int64_t steps) {
    const auto task = task_with(options, steps * kBatch);
    Cost cost;
    lockstep::run(options.devices, [&](Rank& rank) {
      const lockstep::TrainCallbacks callbacks;
      lockstep::RankTrainer trainer(options, callbacks, task, rank, nullptr, nullptr);
      const Cost of_rank = of_second(rank, [&](int epoch) { trainer.epoch(epoch); });
      if (rank.index() == 0) cost = of_rank;
    });
    return cost;
  });
}

TrainOptions training(const std::string& model, int count = 1) {
  TrainOptions options;
  options.model.name = model;
  if (model == "gpt") {
    options.model = {.name = "gpt", .layers = 2, .heads = 2, .embedding = 8, .context = 8};
  } else if (model != "lenet") {
    options.model.width = 0.0625;
  }
  options.devices = gpus(count);
  return options;
}

// The launches of a step that calls LibTorch alone: batch, forward, loss, backward and one fused update.
int64_t launches_of_libtorch(const TrainOptions& options) {
  const c10::Device device = gpus(1)[0];
  const auto task = task_with(options, kBatch);
  const auto x = task.train.tensors().x.to(device), y = task.train.tensors().y.to(device);
  const auto order = torch::arange(kBatch, torch::TensorOptions(torch::kLong).device(device));
  auto net = lockstep::make_model(options.model);
  net->to(device);
  const auto step = [&] {
    for (auto& parameter : net->parameters()) parameter.mutable_grad().reset();
    lockstep::Batch batch{.x = x.index_select(0, order), .y = y.index_select(0, order)};
    if (batch.x.scalar_type() == torch::kByte) batch.x = batch.x.to(torch::kFloat).div_(255);
    task.criterion(net->forward(batch.x), batch).backward();
    const torch::NoGradGuard no_grad;
    std::vector<torch::Tensor> gradients;
    for (auto& parameter : net->parameters()) gradients.push_back(parameter.grad());
    at::_fused_sgd_(net->parameters(), gradients, {}, 0, 0, 0.1, 0, false, false, false);
  };
  step();
  const Cost before = Cost::now();
  step();
  return (Cost::now() - before).launches;
}

// One adds up the losses. Three count right answers: the largest outputs, the comparison, the sum. One looks whether
// the gradients and the loss are finite, and a copy tells the host. Fused layers save one kernel each.
TEST(CostOfAStep, IsThatOfLibTorchAndFiveKernelsAndACopy) {
  for (const std::string model : {"lenet", "mlp", "resnet18", "gpt"}) {
    const int64_t counts = model == "gpt" ? 2 : 5;  // nobody counts right answers of a text
    const int64_t fused = lockstep::fuse_layers(*lockstep::make_model(training(model).model));
    EXPECT_EQ(of_step(training(model)), (Cost{0, 0, launches_of_libtorch(training(model)) + counts + 1 - fused}))
        << model;
    EXPECT_EQ(fused, model == "mlp" ? 6 : model == "lenet" ? 1 : 0);
  }
}

// ---- Each rank asks whether the step before was finite, while its GPU has the next one to do.

TEST(CostOfAStep, OfLeNet) {
  EXPECT_EQ(of_step(training("lenet")), (Cost{0, 0, 37}));
  EXPECT_EQ(of_step(training("lenet", 2)), (Cost{0, 0, 113}));
  TrainOptions options = training("lenet");
  options.on_nan = lockstep::OnNan::go_on;
  EXPECT_EQ(of_step(options), (Cost{0, 0, 35}));
}

TEST(CostOfAStep, OfEachOptimizer) {
  const auto of = [](const std::string& model, OptimizerKind kind, double momentum) {
    TrainOptions options = training(model);
    options.optimizer.kind = kind;
    options.optimizer.momentum = momentum;
    return of_step(options);
  };
  EXPECT_EQ(of("lenet", OptimizerKind::sgd, 0.9), (Cost{0, 0, 37}));
  EXPECT_EQ(of("lenet", OptimizerKind::adamw, 0), (Cost{0, 0, 38}));
  EXPECT_EQ(of("resnet18", OptimizerKind::sgd, 0), (Cost{0, 0, 172}));
  EXPECT_EQ(of("resnet18", OptimizerKind::sgd, 0.9), (Cost{0, 0, 172}));
  EXPECT_EQ(of("resnet18", OptimizerKind::adamw, 0), (Cost{0, 0, 173}));
}

TEST(CostOfAStep, WithASplitByChannels) {
  TrainOptions options = training("lenet", 2);
  options.way = lockstep::SplitNetwork{{.mesh = {.tensor = 2}}};
  EXPECT_EQ(of_step(options), (Cost{0, 0, 133}));
}

TEST(CostOfAStep, WithZero) {
  for (const int stage : {1, 2}) {
    TrainOptions options = training("lenet", 2);
    options.way = static_cast<lockstep::Sharded>(stage);
    options.optimizer.kind = OptimizerKind::adamw;
    EXPECT_EQ(of_step(options), (stage == 1 ? Cost{0, 0, 115} : Cost{0, 0, 117})) << stage;
  }
}

TEST(CostOfAStep, InAPipeline) {
  TrainOptions options = training("lenet", 2);
  options.way = lockstep::SplitNetwork{{.mesh = {.pipeline = 2}, .microbatches = 4}};
  EXPECT_EQ(of_step(options), (Cost{0, 0, 192}));
}

// ---- In a loop of one's own, with data on the CPU.

TEST(CostOfAStep, InALoopOverBatches) {
  const auto of = [](bool shuffle) {
    return of_step([&](int64_t steps) {
      const auto data = lockstep::synthetic_images(steps * kBatch, kBatch);
      Cost cost;
      lockstep::run(gpus(2), [&](Rank& rank) {
        lockstep::DataParallel net(torch::nn::Sequential(torch::nn::Flatten(), torch::nn::Linear(784, 10)), rank);
        torch::optim::SGD sgd(net->parameters(), 0.1);
        const Cost of_rank = of_second(rank, [&](int epoch) {
          for (auto& batch :
               lockstep::batches(data.train, {.size = kBatch, .epoch = epoch, .shuffle = shuffle}, rank)) {
            sgd.zero_grad();
            net.loss(batch, torch::nn::functional::cross_entropy).backward();
            sgd.step();
          }
        });
        if (rank.index() == 0) cost = of_rank;
      });
      return cost;
    });
  };
  for (const bool shuffle : {true, false}) EXPECT_EQ(of(shuffle), (Cost{0, 0, 45})) << shuffle;
}

// It returns the loss, for which each GPU is waited for.
TEST(CostOfAStep, OfTrainBatch) {
  const auto data = lockstep::synthetic_images(kBatch, kBatch);
  const auto x = data.train.x.to(torch::kFloat), y = data.train.y;
  const Devices devices = gpus(2);
  std::vector<std::vector<torch::Tensor>> parameters;
  for (const auto& device : devices) parameters.push_back(lockstep::get_params(lockstep::lenet_params(), device));
  lockstep::train_batch(x, y, parameters, devices, 0.1);
  const Cost before = Cost::now();
  for (int step = 0; step < 2; ++step) lockstep::train_batch(x, y, parameters, devices, 0.1);
  EXPECT_EQ((Cost::now() - before) / 2, (Cost{2, 0, 188}));
}

// ---- One call.

Cost of_allreduce(const Devices& devices) {
  Cost cost;
  lockstep::run(devices, [&](Rank& rank) {
    const auto values = torch::ones({1 << 14}, rank.device());
    const Cost of_rank = of_second(rank, [&](int) { rank.allreduce(values); });
    if (rank.index() == 0) cost = of_rank;
  });
  return cost;
}

// Adding four ranks' values takes three sums, and three copies of the result. On two GPUs each adds up one half.
TEST(CostOfAnAllreduce, IsOneSumOnEachGpu) {
  const Devices gpu = gpus(2);
  EXPECT_EQ(of_allreduce({gpu[0], gpu[0], gpu[0], gpu[0]}), (Cost{0, 0, 6}));
  EXPECT_EQ(of_allreduce({gpu[0], gpu[0], gpu[1], gpu[1]}), (Cost{0, 0, 17}));
}

TEST(CostOfAnAllreduce, HasStreamsOfHighPriority) {
  for (const auto& devices : {gpus(2), Devices(2, gpus(1)[0])}) {
    const int64_t before = lockstep::simulated::high_priority_launches();
    const int64_t launches = of_allreduce(devices).launches;
    EXPECT_GE(lockstep::simulated::high_priority_launches() - before, 2 * launches);  // it makes two
  }
}

// ---- Other GPUs.

// CUDA makes a context of hundreds of MB on a GPU that is only asked for its memory.
TEST(OtherGpus, StayAsTheyAre) {
  const std::vector<int> others{0, 1, 3};
  const auto uses = [&] {
    std::vector<int64_t> of_each;
    for (const int gpu : others) of_each.push_back(lockstep::simulated::uses_of(gpu));
    return of_each;
  };
  TrainOptions options = training("lenet");
  options.devices = {c10::Device("cuda:2")};
  options.batch.size = kBatch;
  const auto data = lockstep::synthetic_images(kBatch, kBatch);
  const auto before = uses();
  lockstep::run(options.devices, [&](Rank& rank) {
    const lockstep::TrainCallbacks callbacks;
    lockstep::RankTrainer(options, callbacks, task_of(options, data), rank, nullptr, nullptr).epoch(1);
    lockstep::measured_cluster({}, rank);
  });
  EXPECT_EQ(uses(), before);
}

}  // namespace cost_test
