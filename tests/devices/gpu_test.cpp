// Labels: gpu
// What only a GPU can show: recorded steps, the fused update, bfloat16, and an exchange that runs beside computation.
// Compiled everywhere, and run on simulated GPUs where there are such; without a GPU every test says so and is skipped.
#include <ATen/Context.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <unistd.h>
#include <lockstep/devices/autocast.hpp>
#include <lockstep/devices/device_info.hpp>
#include <lockstep/models/models.hpp>
#include <lockstep/nn/dropout.hpp>
#include <lockstep/nn/sample_scope.hpp>
#include <lockstep/nn/weights.hpp>
#include <lockstep/trainer/fit.hpp>
#include <lockstep/trainer/trainer.hpp>

#include "devices/cuda_graph.hpp"
#include "optim/fused_optimizers.hpp"
#include "simulated/nccl_program/replayed_sums.hpp"
#include "simulated/soon_ended.hpp"
#include "support/error_of.hpp"
#include "support/simulated_device.hpp"
#include "support/small_images.hpp"
#include "trainer/rank_trainer.hpp"
#include "trainer/workload.hpp"

#include <chrono>
#include <csignal>
#include <future>
#include <iostream>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <type_traits>

namespace gpu_test {

using lockstep::Devices;
using lockstep::Error;
using lockstep::Fails;
using lockstep::Rank;
using lockstep::Refused;
using lockstep::TrainOptions;

class Gpu : public testing::Test {
 protected:
  void SetUp() override {
    if (lockstep::gpus().empty()) GTEST_SKIP() << "LibTorch finds no GPU here";
  }

  // One rank; two that share a GPU (our own exchange); two on GPUs of their own (NCCL), where there are two.
  static std::vector<Devices> worlds() {
    const c10::Device first("cuda:0");
    std::vector<Devices> worlds = {{first}, {first, first}};
    if (lockstep::gpus().size() > 1) worlds.push_back({first, c10::Device("cuda:1")});
    return worlds;
  }

  static c10::Stream new_stream() {
    return c10::impl::VirtualGuardImpl(c10::kCUDA).getStreamFromGlobalPool({c10::kCUDA, 0});
  }
};

TEST_F(Gpu, AGraphReplaysWhatItRecordedAndRandomNumbersGoOn) {
  const c10::StreamGuard stream(new_stream());
  torch::Tensor sum = torch::zeros({4}, torch::kCUDA), noise = torch::zeros({1000}, torch::kCUDA);
  const auto work = [&] {
    sum.add_(1);
    noise.copy_(torch::rand_like(noise));
  };
  work();
  lockstep::synchronize(sum.device());
  const auto graph = lockstep::make_cuda_graph();
  graph->record([&] {
    EXPECT_TRUE(lockstep::is_recording());
    work();
  });
  EXPECT_FALSE(lockstep::is_recording());
  EXPECT_EQ(sum[0].item<float>(), 1);  // recorded, not done
  graph->replay();
  const torch::Tensor first = noise.clone();
  graph->replay();
  EXPECT_TRUE(torch::equal(sum.cpu(), torch::full({4}, 3.0f)));
  EXPECT_FALSE(torch::equal(first, noise));
}

TEST_F(Gpu, TheFusedOptimizersAreTheReferences) {
  const auto expect_alike = []<class Fused, class Reference>(std::type_identity<Fused>, std::type_identity<Reference>,
                                                             const auto& options) {
    torch::manual_seed(1);
    lockstep::LeNet mine(1), theirs(1);
    for (auto* net : {&mine, &theirs}) (*net)->to(torch::kCUDA);
    Fused fused(mine->parameters(), options);
    Reference reference(theirs->parameters(), options);
    for (int step = 0; step < 5; ++step) {
      for (size_t i = 0; i < mine->parameters().size(); ++i) {
        const torch::Tensor gradient = torch::randn(mine->parameters()[i].sizes()).to(torch::kCUDA);
        mine->parameters()[i].mutable_grad() = gradient;
        theirs->parameters()[i].mutable_grad() = gradient.clone();
      }
      fused.step();
      reference.step();
    }
    for (size_t i = 0; i < mine->parameters().size(); ++i) {
      EXPECT_TRUE(torch::allclose(mine->parameters()[i], theirs->parameters()[i], 1e-5, 1e-5)) << i;
    }
  };
  using namespace torch::optim;
  expect_alike(std::type_identity<lockstep::FusedSgd>(), std::type_identity<SGD>(), SGDOptions(0.2));
  expect_alike(std::type_identity<lockstep::FusedSgd>(), std::type_identity<SGD>(),
               SGDOptions(0.1).momentum(0.9).nesterov(true).weight_decay(0.01));
  expect_alike(std::type_identity<lockstep::FusedAdam>(), std::type_identity<Adam>(),
               AdamOptions(0.01).weight_decay(0.1));
  expect_alike(std::type_identity<lockstep::FusedAdamW>(), std::type_identity<AdamW>(), AdamWOptions(0.01));
}

TEST_F(Gpu, AutocastComputesProductsInBfloat16) {
  const torch::Tensor square = torch::ones({8, 8}, torch::kCUDA);
  {
    const lockstep::Autocast bf16(square.device());
    EXPECT_EQ(torch::mm(square, square).scalar_type(), torch::kBFloat16);
  }
  EXPECT_EQ(torch::mm(square, square).scalar_type(), torch::kFloat);
}

TEST_F(Gpu, DropoutDropsWhatItDropsOnTheCpu) {
  const torch::Tensor x = torch::ones({6, 5, 4, 3});
  for (const bool whole_channels : {false, true}) {
    lockstep::Dropout layer(lockstep::DropoutImpl::Options{.p = 0.3, .whole_channels = whole_channels});
    const lockstep::SampleScope::Place place{.seed = 3, .step = 2, .first = 7, .size = 6};
    const auto dropped = [&](const torch::Tensor& samples) {
      const lockstep::SampleScope scope(place);
      return layer->forward(samples).cpu();
    };
    EXPECT_TRUE(dropped(x.to(torch::kCUDA)).equal(dropped(x)));
  }
}

class GpuTrainer : public Gpu {
 protected:
  GpuTrainer() {
    lockstep::write_small_images(images_, lockstep::simulated::is_there() ? 180 : 300, 100);
    // By default cuDNN's convolutions round otherwise than the CPU's, and otherwise each time.
    at::globalContext().setAllowTF32CuDNN(false);
    at::globalContext().setDeterministicCuDNN(true);
  }
  ~GpuTrainer() override {
    at::globalContext().setAllowTF32CuDNN(had_tf32_);
    at::globalContext().setDeterministicCuDNN(was_deterministic_);
  }

  // Epochs of full batches and a smaller one, at first three ordinary ones.
  lockstep::TrainResult train(const Devices& devices, const std::function<void(TrainOptions&)>& change) const {
    TrainOptions options;
    options.data = lockstep::FashionMnist{images_.path()};
    options.devices = devices;
    options.batch.size = 32;
    options.epochs = lockstep::simulated::is_there() ? 1 : 3;
    change(options);
    return lockstep::train(options);
  }

  static void expect_near(const lockstep::TrainResult& result, const lockstep::TrainResult& expected, double loss,
                          double accuracy) {
    ASSERT_EQ(result.history.size(), expected.history.size());
    for (size_t i = 0; i < expected.history.size(); ++i) {
      EXPECT_NEAR(result.history[i].train_loss, expected.history[i].train_loss, loss) << "epoch " << i + 1;
      EXPECT_NEAR(result.history[i].train_accuracy, expected.history[i].train_accuracy, accuracy) << "epoch " << i + 1;
      EXPECT_NEAR(result.history[i].test_accuracy, expected.history[i].test_accuracy, accuracy) << "epoch " << i + 1;
    }
  }

  const lockstep::ScratchFolder images_;
  const bool had_tf32_ = at::globalContext().allowTF32CuDNN();
  const bool was_deterministic_ = at::globalContext().deterministicCuDNN();
};

TEST_F(GpuTrainer, RecordedStepsGiveWhatOtherStepsGive) {
  const auto on_cpu = train({torch::kCPU}, [](TrainOptions&) {});
  for (const auto& devices : worlds()) {
    SCOPED_TRACE(lockstep::to_string(devices));
    const auto eager = train(devices, [](TrainOptions&) {});
    expect_near(eager, on_cpu, 1e-3, 0.02);
    expect_near(train(devices, [](TrainOptions& o) { o.cuda_graph = true; }), eager, 1e-4, 0.02);
  }
}

// Values that change from step to step: rates, the number of steps that Adam counts, and the parts of a batch.
TEST_F(GpuTrainer, RecordedStepsGoWithEveryUpdate) {
  const std::vector<std::function<void(TrainOptions&)>> updates = {
      [](TrainOptions& o) {
        o.optimizer.kind = lockstep::OptimizerKind::adamw;
        o.optimizer.clip = 1;
        o.rate.lr = 0.01;
        o.rate.warmup_epochs = 1;
      },
      [](TrainOptions& o) {
        o.optimizer.momentum = 0.9;
        o.rate.lr = 0.01;
        o.batch.accumulate = 3;
        o.check_replicas = 2;  // so that the update follows the replay
      },
      [](TrainOptions& o) {
        o.model = {.name = "resnet18", .width = 0.0625, .image_size = 9};
        o.sync_batchnorm = true;
      },
      [](TrainOptions& o) { o.batch.grain = 8; },
      [](TrainOptions& o) { o.way = lockstep::Averaged{lockstep::Rounding::bf16}; },
      [](TrainOptions& o) { o.way = lockstep::PowerSgd{2}; },
      [](TrainOptions& o) {
        o.way = lockstep::Sharded::state;
        o.optimizer.kind = lockstep::OptimizerKind::adam;
        o.rate.lr = 0.01;
      },
      [](TrainOptions& o) {
        o.way = lockstep::Sharded::gradients;
        o.optimizer.momentum = 0.9;
        o.batch.accumulate = 2;
      },
      [](TrainOptions& o) {
        o.batch.grain = 4;
        o.batch.accumulate = 2;
        o.optimizer.momentum = 0.9;
      },
  };
  const double rounding = lockstep::simulated::is_there() ? 0 : 1e-4;
  for (const auto& devices : worlds()) {
    if (devices.size() == 2 && devices[0] == devices[1]) continue;  // two ranks with a GPU each do the same
    for (size_t i = 0; i < updates.size(); ++i) {
      SCOPED_TRACE(lockstep::to_string(devices) + ", " + std::to_string(i));
      const auto graphed = train(devices, [&](TrainOptions& o) {
        updates[i](o);
        o.cuda_graph = true;
      });
      const auto eager = train(devices, updates[i]);
      expect_near(graphed, eager, rounding, 0.02);
      TrainOptions options;
      updates[i](options);
      if (options.batch.grain || lockstep::simulated::is_there()) {
        EXPECT_EQ(graphed.history.back().weights, eager.history.back().weights);
      }
    }
  }
}

// Skips the steps that ordinary steps skip, and counts Adam's steps likewise.
TEST_F(GpuTrainer, RecordedStepsSkipWhatOtherStepsSkip) {
  auto data = lockstep::synthetic_images(180, 20);
  data.train.x = data.train.x.to(torch::kFloat) / 255;
  for (const int64_t spoilt : {5, 50, 100}) data.train.x[spoilt].fill_(std::numeric_limits<float>::quiet_NaN());
  const std::vector<std::function<void(TrainOptions&)>> kinds = {
      [](TrainOptions& o) { o.optimizer.momentum = 0.9; },
      [](TrainOptions& o) {
        o.model = {.name = "resnet18", .width = 0.0625, .image_size = 9};  // with running statistics
        o.optimizer.kind = lockstep::OptimizerKind::adam;
        o.rate.lr = 0.01;
      },
      [](TrainOptions& o) { o.batch.grain = 8; },
      [](TrainOptions& o) {
        o.way = lockstep::Sharded::state;
        o.optimizer.kind = lockstep::OptimizerKind::adamw;
        o.rate.lr = 0.01;
      },
  };
  for (const auto& devices : worlds()) {
    if (devices.size() == 2 && devices[0] == devices[1]) continue;
    for (size_t i = 0; i < kinds.size(); ++i) {
      SCOPED_TRACE(lockstep::to_string(devices) + ", " + std::to_string(i));
      const auto train_with = [&](bool cuda_graph) {
        TrainOptions options;
        options.devices = devices;
        options.cuda_graph = cuda_graph;
        options.batch.size = 16;
        options.epochs = 2;
        options.on_nan = lockstep::OnNan::skip;
        kinds[i](options);
        lockstep::TrainCallbacks callbacks;
        std::vector<std::string> warnings;
        callbacks.on_warning = [&](const std::string& text) { warnings.push_back(text); };
        auto result = lockstep::run_workload(options, callbacks,
                                             [&] { return lockstep::Workload{.task = task_of(options, data)}; });
        return std::pair(result, warnings);
      };
      const auto [graphed, told] = train_with(true);
      const auto [eager, expected] = train_with(false);
      EXPECT_THAT(expected, testing::Not(testing::IsEmpty()));
      EXPECT_EQ(told, expected);
      expect_near(graphed, eager, lockstep::simulated::is_there() ? 0 : 1e-4, 0.02);
      if (lockstep::simulated::is_there()) EXPECT_EQ(graphed.history.back().weights, eager.history.back().weights);
    }
  }
}

// The gradients are finite. Lars's update follows the replay.
TEST_F(GpuTrainer, ALossThatIsNotFiniteEndsARunOfRecordedSteps) {
  namespace F = torch::nn::functional;
  auto data = lockstep::synthetic_images(180, 20);
  data.train.y.clamp_max_(8);
  data.train.y[77] = 9;
  const lockstep::Task task{
      .name = "ends",
      .module = [] { return torch::nn::Sequential(torch::nn::Flatten(), torch::nn::Linear(784, 10)); },
      .criterion =
          [](const torch::Tensor& y_hat, const torch::Tensor& y) {
            const auto infinite = torch::full({}, std::numeric_limits<float>::infinity(), y_hat.options());
            return F::cross_entropy(y_hat, y) + torch::where((y == 9).any(), infinite, 0);
          },
      .train = {data.train}};
  for (const auto kind : {lockstep::OptimizerKind::sgd, lockstep::OptimizerKind::lars}) {
    for (const uint64_t seed : {1, 2, 3}) {  // in another step
      EXPECT_THAT(lockstep::error_of([&] {
                    lockstep::fit(task, {.devices = {c10::Device("cuda:0")},
                                         .cuda_graph = true,
                                         .batch = {.size = 16},
                                         .optimizer = {.kind = kind},
                                         .rate = {.lr = 0.01},
                                         .seed = seed});
                  }),
                  Fails(Error::not_finite, {}));
    }
  }
}

// Three steps are skipped before any is taken.
TEST_F(GpuTrainer, StepsThatAreSkippedAtTheBeginningAreNotRecorded) {
  auto data = lockstep::synthetic_images(96, 20);
  data.train.x = data.train.x.to(torch::kFloat) / 255;
  TrainOptions options;
  options.devices = {c10::Device("cuda:0")};
  options.batch.size = 8;
  options.on_nan = lockstep::OnNan::skip;
  options.epochs = 1;
  int64_t number = 0;
  for (auto& batch : lockstep::batches(data.train, {.size = 8, .seed = options.seed, .epoch = 1})) {
    if (number++ == 4) break;
    for (int64_t row = 0; row < 96; ++row) {
      if (data.train.x[row].equal(batch.x[0])) data.train.x[row].fill_(std::numeric_limits<float>::quiet_NaN());
    }
  }
  const auto loss_with = [&](bool cuda_graph) {
    options.cuda_graph = cuda_graph;
    lockstep::TrainCallbacks callbacks;
    callbacks.on_warning = [](const std::string&) {};
    return lockstep::run_workload(options, callbacks,
                                  [&] { return lockstep::Workload{.task = task_of(options, data)}; })
        .history.at(0)
        .train_loss;
  };
  EXPECT_NEAR(loss_with(true), loss_with(false), lockstep::simulated::is_there() ? 0 : 1e-4);
}

TEST_F(GpuTrainer, WhatNoGraphCanHoldIsRefusedBeforeTheFirstStep) {
  const auto refused = [&](int ranks, const std::function<void(TrainOptions&)>& change) {
    return lockstep::error_of([&] {
      train(Devices(ranks, c10::Device("cuda:0")), [&](TrainOptions& o) {
        o.cuda_graph = true;
        change(o);
      });
    });
  };
  EXPECT_THAT(refused(2, [](TrainOptions& o) { o.batch.grain = 8; }), Refused("devices", "cuda_graph"));
  EXPECT_THAT(refused(2, [](TrainOptions& o) { o.way = lockstep::Sharded::state; }), Refused("devices", "cuda_graph"));
  const auto skip = [](TrainOptions& o) { o.on_nan = lockstep::OnNan::skip; };
  EXPECT_THAT(refused(2, skip), Refused("cuda_graph", "on_nan"));
  EXPECT_THAT(refused(1,
                      [&](TrainOptions& o) {
                        skip(o);
                        o.optimizer.kind = lockstep::OptimizerKind::lars;
                      }),
              Refused("cuda_graph", "on_nan"));
}

// A step is the numbers of its rows, the replay, and the answer whether the step before was finite.
TEST_F(GpuTrainer, ARecordedStepIsThreeLaunches) {
  if (!lockstep::simulated::is_there()) GTEST_SKIP() << "a real GPU does not count its launches";
  const auto launches = [](int64_t steps) {
    const auto data = lockstep::synthetic_images(steps * 8, 8);
    TrainOptions options;
    options.batch.size = 8;
    options.cuda_graph = true;
    const lockstep::TrainCallbacks callbacks;
    int64_t count = 0;
    lockstep::run({c10::Device("cuda:0")}, [&](Rank& rank) {
      lockstep::RankTrainer trainer(options, callbacks, task_of(options, data), rank, nullptr,
                                    lockstep::make_cuda_graph());
      trainer.epoch(1);
      const int64_t before = lockstep::simulated::launches();
      trainer.epoch(2);
      count = lockstep::simulated::launches() - before;
    });
    return count;
  };
  EXPECT_EQ(launches(16) - launches(8), 8 * 3);
}

TEST_F(GpuTrainer, RecordedStepsDropWhatOtherStepsDrop) {
  namespace nn = torch::nn;
  const auto data = lockstep::synthetic_images(180, 20);
  const lockstep::Task task{.name = "drops",
                            .module =
                                [] {
                                  return nn::Sequential(nn::Flatten(), nn::Linear(784, 32), lockstep::Dropout(0.5),
                                                        nn::ReLU(), lockstep::Dropout(0.25), nn::Linear(32, 10));
                                },
                            .criterion = nn::functional::cross_entropy,
                            .train = {data.train}};
  for (const auto& devices : worlds()) {
    SCOPED_TRACE(lockstep::to_string(devices));
    const auto losses = [&](bool cuda_graph, int accumulate) {
      const auto result = lockstep::fit(task, {.devices = devices,
                                               .cuda_graph = cuda_graph,
                                               .batch = {.size = 32, .accumulate = accumulate},
                                               .rate = {.lr = 0.1},
                                               .epochs = 3});
      std::vector<double> losses;
      for (const auto& metrics : result.history) losses.push_back(metrics.train_loss);
      return losses;
    };
    const double rounding = lockstep::simulated::is_there() ? 0 : 1e-4;
    for (const int accumulate : {1, 2}) {
      EXPECT_THAT(losses(true, accumulate),
                  testing::Pointwise(testing::DoubleNear(rounding), losses(false, accumulate)));
    }
  }
}

TEST_F(GpuTrainer, PrecisionAndMemoryFormatGoWithRecordedSteps) {
  for (const auto& devices : worlds()) {
    SCOPED_TRACE(lockstep::to_string(devices));
    const auto bf16 = [](TrainOptions& o) {
      o.precision = lockstep::Precision::bf16;
      o.memory_format = lockstep::MemoryFormat::channels_last;
    };
    const auto eager = train(devices, bf16);
    expect_near(eager, train(devices, [](TrainOptions&) {}), 0.02, 0.2);
    const auto graphed = train(devices, [&](TrainOptions& o) {
      bf16(o);
      o.cuda_graph = true;
    });
    expect_near(graphed, eager, 1e-2, 0.1);
  }
}

// Keeps a stream busy: a GPU for seconds, a simulated one until this is destroyed.
class Computation {
 public:
  explicit Computation(const c10::Stream& stream) : stream_(stream) {
    if (lockstep::simulated::is_there()) return;
    large_ = torch::zeros({8192, 8192}, stream.device());
    product_ = torch::mm(large_, large_);
  }
  ~Computation() { end_.set_value(); }

  void queue() {
    for (int i = 0; large_.defined() && i < 100; ++i) torch::mm_out(product_, large_, large_);
    if (large_.defined()) return;
    lockstep::simulated::queue(stream_.device_index(), stream_.id(),
                               [ended = ended_] { ended.wait_for(std::chrono::seconds(5)); });
  }

 private:
  const c10::Stream stream_;
  torch::Tensor large_, product_;
  std::promise<void> end_;
  const std::shared_future<void> ended_ = end_.get_future().share();
};

// The exchange is done while the ranks' own streams are still busy with what was queued before anybody waited for it.
TEST_F(Gpu, AnExchangeRunsBesideComputation) {
  for (const auto& devices : worlds()) {
    if (devices.size() < 2) continue;
    SCOPED_TRACE(lockstep::to_string(devices));
    lockstep::run(devices, [](Rank& rank) {
      const auto stream = [&] {
        return c10::impl::VirtualGuardImpl(c10::kCUDA).getStreamFromGlobalPool(rank.device());
      };
      const c10::StreamGuard own(stream());
      auto computation = std::make_unique<Computation>(own.current_stream());
      std::vector<torch::Tensor> tensors = {torch::full({1000}, rank.index() + 1.0f, rank.device())};
      rank.allreduce(tensors[0].clone());  // the first call sets up what later ones use
      lockstep::synchronize(rank.device());
      rank.barrier();

      const auto work = rank.backend().allreduce(tensors, {});
      computation->queue();
      c10::Event computed(c10::kCUDA), exchanged(c10::kCUDA);
      computed.record(own.current_stream());
      {
        const c10::StreamGuard beside(stream());
        work->wait();
        exchanged.record(beside.current_stream());
      }
      while (!exchanged.query()) std::this_thread::yield();
      EXPECT_FALSE(computed.query()) << "rank " << rank.index();
      computation.reset();
      lockstep::synchronize(rank.device());
      EXPECT_EQ(tensors[0].min().item<float>(), 3);
      EXPECT_EQ(tensors[0].max().item<float>(), 3);
    });
  }
}

using GpuFailures = Gpu;

// Two ranks that share the GPU, of which one waits for the other.
const Devices one_gpu = {c10::Device("cuda:0"), c10::Device("cuda:0")};

TEST_F(GpuFailures, ARankThatFailsEndsAnotherThatReplays) {
  lockstep::Caught caught;
  EXPECT_THAT(lockstep::soon_ended(one_gpu,
                                   [&](Rank& rank) {
                                     lockstep::ReplayedSums sums(rank);
                                     if (rank.index() == 1) {
                                       sums.steps(lockstep::ReplayedSums::kSomeSteps);
                                       throw std::runtime_error("out of luck");
                                     }
                                     caught = lockstep::error_of([&] { sums.steps(500); });
                                     throw std::runtime_error("as told");
                                   }),
              Fails(Error::user_code, {1}));
  EXPECT_THAT(caught, Fails(Error::user_code, {1}));
}

TEST_F(GpuFailures, ARankThatNeedsMoreMemoryThanThereIsIsNamed) {
  const auto needs_much = [](Rank& rank) {
    rank.barrier();
    if (rank.index() == 1) torch::empty({int64_t{1} << 42}, rank.device());
    rank.allreduce(torch::ones({4}, rank.device()));
  };
  EXPECT_THAT(lockstep::soon_ended(one_gpu, needs_much), Fails(Error::machine, {1}));
  EXPECT_EQ(torch::ones({4}, torch::kCUDA).sum().item<float>(), 4);  // the GPU is as good as before
}

// A kernel that finds a wrong index ends all use of the GPU by its process. So the test makes another process. LibTorch
// may abort it: then a destructor could not give memory back.
TEST_F(GpuFailures, AKernelThatFailsEndsAllRanksSoon) {
  if (lockstep::simulated::is_there()) return;  // a simulated kernel complains when it is called
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto fail = [] {
    const auto start = std::chrono::steady_clock::now();
    const auto error = lockstep::error_of([] {
      lockstep::run(one_gpu, [](Rank& rank) {
        torch::Tensor values = torch::ones({4}, rank.device());
        for (int step = 0; step < 1000; ++step) {
          rank.allreduce(values);
          if (step == 3 && rank.index() == 1)
            values =
                values.index_select(0, torch::full({4}, 100, torch::TensorOptions(rank.device()).dtype(torch::kLong)));
        }
        lockstep::synchronize(rank.device());
      });
    });
    std::cerr << error << "\n";
    _exit(std::chrono::steady_clock::now() - start < std::chrono::seconds(20) ? 0 : 1);
  };
  const auto ends = [](int status) {
    return testing::ExitedWithCode(0)(status) || testing::KilledBySignal(SIGABRT)(status);
  };
  EXPECT_EXIT(fail(), ends, "CUDA error");
}

// This test is the last: what is left of the failed recording is LibTorch's, and differs between versions.
TEST_F(GpuFailures, AWorkThatCannotBeRecordedThrowsAndLeavesTheStreamUsable) {
  const c10::StreamGuard stream(new_stream());
  const torch::Tensor x = torch::ones({4}, torch::kCUDA);
  const auto graph = lockstep::make_cuda_graph();
  EXPECT_ANY_THROW(graph->record([&] { x.sum().item<float>(); }));  // the host would wait
  EXPECT_FALSE(lockstep::is_recording());
  EXPECT_EQ((x + 1).sum().item<float>(), 8);
}

}  // namespace gpu_test
