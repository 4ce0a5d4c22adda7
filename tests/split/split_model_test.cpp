// Labels: concurrency arithmetic 3x3 2x4
// SplitModel: over every mesh a net learns what it learns on one device.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/base/error.hpp>
#include <lockstep/data_parallel/convert_sync_batchnorm.hpp>
#include <lockstep/data_parallel/optimizer.hpp>
#include <lockstep/devices/autocast.hpp>
#include <lockstep/models/residual_block.hpp>
#include <lockstep/ranks/evaluate.hpp>
#include <lockstep/split/split_model.hpp>

#include "data/parts.hpp"
#include "devices/memory_meter.hpp"
#include "support/error_of.hpp"
#include "support/group_tests.hpp"
#include "support/test_devices.hpp"

#include <functional>
#include <optional>
#include <random>
#include <string>
#include <vector>

namespace split_model_test {

using lockstep::Batch;
using lockstep::Error;
using lockstep::error_of;
using lockstep::Fails;
using lockstep::ModelSplit;
using lockstep::PipelineSchedule;
using lockstep::Rank;
using lockstep::Refused;
using lockstep::SplitModel;
using torch::Tensor;
using torch::nn::Sequential;

// Counts of channels and units divide by 2, 3 and 4.
Sequential make_net() {
  Sequential net;
  net->push_back("conv1", torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 12, 3).padding(1)));
  net->push_back("tanh1", torch::nn::Tanh());
  net->push_back("conv2", torch::nn::Conv2d(torch::nn::Conv2dOptions(12, 12, 3)));
  net->push_back("relu2", torch::nn::ReLU());
  net->push_back("flatten", torch::nn::Flatten());
  net->push_back("fc1", torch::nn::Linear(12 * 4 * 4, 24));
  net->push_back("tanh3", torch::nn::Tanh());
  net->push_back("fc2", torch::nn::Linear(24, 12));
  net->to(torch::kDouble);
  int64_t number = 0;  // weights that look random, the same on every thread
  const torch::NoGradGuard no_grad;
  for (auto& parameter : net->parameters()) {
    const Tensor values = (torch::arange(parameter.numel()) * 7919 + 31 * ++number) % 1009;
    parameter.copy_((values.to(torch::kDouble) / 1009 - 0.5).view(parameter.sizes()) / 2);
  }
  return net;
}

Batch make_batch(int64_t size, int step) {
  const Tensor values = (torch::arange(size * 36) * 6007 + 97 * step) % 997;
  return {(values.to(torch::kDouble) / 997).view({size, 1, 6, 6}), (torch::arange(size) * 5 + step) % 12, size};
}

Batch part_of(const Batch& batch, const Rank& rank) {
  const auto part = lockstep::part_of(batch.size(), rank.index(), rank.world_size());
  return {batch.x.slice(0, part.begin, part.end).to(rank.device()),
          batch.y.slice(0, part.begin, part.end).to(rank.device()), batch.global_size};
}

constexpr int steps = 3;
const std::vector<int64_t> sizes = {7, 3, 8};  // sizes of the steps' global batches

// After some steps on one device: the losses, and the net.
std::pair<std::vector<double>, Sequential> train_whole() {
  auto net = make_net();
  torch::optim::SGD sgd(net->parameters(), /*lr=*/0.5);
  std::vector<double> losses;
  for (int step = 0; step < steps; ++step) {
    const Batch batch = make_batch(sizes[step], step);
    sgd.zero_grad();
    const Tensor loss = torch::nn::functional::cross_entropy(net->forward(batch.x), batch.y);
    loss.backward();
    sgd.step();
    losses.push_back(loss.item<double>());
  }
  return {losses, net};
}

void expect_close(const Tensor& actual, const Tensor& expected, const std::string& what) {
  EXPECT_TRUE(torch::allclose(actual.cpu(), expected.cpu(), /*rtol=*/0, /*atol=*/1e-12))
      << what << " differs by " << (actual.cpu() - expected.cpu()).abs().max().item<double>();
}

void expect_trains_like_one_device(Rank& rank, const ModelSplit& split) {
  auto [losses, expected] = train_whole();
  SplitModel net(make_net(), rank, split);
  lockstep::Optimizer sgd(net, torch::optim::SGDOptions(/*lr=*/0.5));
  auto& data = net.mesh().data();
  for (int step = 0; step < steps; ++step) {
    const Batch batch = part_of(make_batch(sizes[step], step), data);
    sgd.zero_grad();
    lockstep::Loss loss = net.loss(batch, torch::nn::functional::cross_entropy);
    loss.backward();
    sgd.step();
    EXPECT_NEAR(loss.global_item(), losses[step], 1e-12);
  }
  auto whole = make_net();
  net.gather(whole);
  const auto parameters = whole->named_parameters();
  for (const auto& item : expected->named_parameters()) expect_close(parameters[item.key()], item.value(), item.key());
  const Batch test = make_batch(5, 9);
  expect_close(net.forward(test.x.to(rank.device())), expected->forward(test.x).detach(), "the output");
}

class SplitModelWorlds : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Sizes, SplitModelWorlds, testing::Values(1, 2, 3, 4),
                         [](const auto& world) { return std::to_string(world.param) + "Ranks"; });

TEST_P(SplitModelWorlds, EveryMeshTrainsLikeOneDevice) {
  lockstep::run(lockstep::test_devices(GetParam()), [](Rank& rank) {
    for (const auto& mesh : lockstep::mesh_shapes(rank.world_size())) {
      SCOPED_TRACE(lockstep::to_string(mesh));
      expect_trains_like_one_device(rank, {.mesh = mesh});
      if (mesh.pipeline > 1) expect_trains_like_one_device(rank, {.mesh = mesh, .microbatches = 3});
    }
  });
}

TEST_P(SplitModelWorlds, SchedulesCutsAndRulesDoNotChangeTheResult) {
  lockstep::run(lockstep::test_devices(GetParam()), [](Rank& rank) {
    std::mt19937 random(7);  // the same on all ranks
    const auto meshes = lockstep::mesh_shapes(rank.world_size());
    for (int round = 0; round < 4; ++round) {
      ModelSplit split{
          .mesh = meshes[random() % meshes.size()],
          .schedule = PipelineSchedule::gpipe,
          .microbatches = 1 + int(random() % 4),
          .recompute = random() % 2 == 0,
          .tensor_rule = random() % 2 == 0 ? lockstep::TensorRule::channels : lockstep::TensorRule::alternating};
      if (split.mesh.pipeline == 2) {
        split.schedule = PipelineSchedule::interleaved;
        split.stages_per_rank = 2;
        split.cuts = {1, 3, 4 + int64_t(random() % 4)};
      }
      SCOPED_TRACE(lockstep::to_string(split.mesh) + ", round " + std::to_string(round));
      expect_trains_like_one_device(rank, split);
    }
  });
}

// The first microbatch's gradients stay, and the others add there.
TEST(SplitModelTest, MicrobatchesNeedTheirGradientsOnce) {
  constexpr int64_t layer_bytes = 512 * 512 * 4;
  const Batch batch{torch::randn({8, 512}), torch::randint(512, {8}), 8};
  lockstep::run(lockstep::test_devices(2), [&](Rank& rank) {
    Sequential whole;
    for (int i = 0; i < 8; ++i) whole->push_back(torch::nn::Linear(512, 512));
    SplitModel net(whole, rank,
                   {.mesh = {.pipeline = 2}, .schedule = PipelineSchedule::gpipe, .microbatches = 4, .cuts = {4}});
    lockstep::Optimizer sgd(net, torch::optim::SGDOptions(0.1));
    net.loss(batch, torch::nn::functional::cross_entropy).backward();
    sgd.zero_grad();
    const lockstep::MemoryMeter meter;
    const int64_t before = meter.current();
    net.loss(batch, torch::nn::functional::cross_entropy).backward();
    EXPECT_LT(meter.peak() - before, (4 + 2) * layer_bytes) << "for four layers' gradients and what makes them";
  });
}

TEST(SplitModelTest, EvaluatesOnAllRanks) {
  auto expected = train_whole().second;
  const Batch all = make_batch(21, 4);
  const lockstep::Dataset images{(all.x * 255).to(torch::kUInt8), all.y};
  lockstep::Score score;
  lockstep::run({torch::kCPU}, [&](Rank& rank) {
    score =
        lockstep::evaluate([&](const Tensor& x) { return expected->forward(x.to(torch::kDouble)); }, images, rank, 8);
  });
  lockstep::run(lockstep::test_devices(4), [&](Rank& rank) {
    for (const auto& mesh : lockstep::mesh_shapes(4)) {
      auto whole = make_net();
      {
        const torch::NoGradGuard no_grad;
        const auto values = expected->named_parameters();
        for (auto& item : whole->named_parameters()) item.value().copy_(values[item.key()]);
      }
      SplitModel net(whole, rank, {.mesh = mesh, .microbatches = 2});
      const auto here = lockstep::evaluate([&](const Tensor& x) { return net.forward(x.to(torch::kDouble)); }, images,
                                           net.mesh().data(), 8);
      EXPECT_EQ(here.correct, score.correct) << lockstep::to_string(mesh);
      EXPECT_EQ(here.total, 21);
      EXPECT_NEAR(here.loss, score.loss, 1e-6);
    }
  });
}

TEST(SplitModelTest, ForwardHasTheAutocastThatLossHad) {
  lockstep::run({torch::kCPU}, [](Rank& rank) {
    for (const int microbatches : {1, 2}) {
      SplitModel net(make_net(), rank, {.microbatches = microbatches});
      std::vector<torch::ScalarType> products;  // types of matrix products, in forward and backward in turns
      const auto loss_of = lockstep::Criterion::unchecked([&](const Tensor& y_hat, const Tensor& y) {
        const auto multiply = [&] {
          const Tensor ones = torch::ones({2, 2});
          products.push_back(ones.mm(ones).scalar_type());
        };
        const Tensor loss = torch::nn::functional::cross_entropy(y_hat, y);
        multiply();
        loss.register_hook([multiply](const Tensor&) { multiply(); });
        return loss;
      });
      std::optional<lockstep::Loss> loss;
      {
        const lockstep::Autocast bf16(rank.device());
        loss.emplace(net.loss(make_batch(4, 0), loss_of));
      }
      loss->backward();
      net.loss(make_batch(4, 0), loss_of).backward();  // without
      ASSERT_EQ(products.size(), 4u * static_cast<size_t>(microbatches));
      for (size_t i = 0; i < products.size(); i += 2) {
        EXPECT_EQ(products[i], i < products.size() / 2 ? torch::kBFloat16 : torch::kFloat);
        EXPECT_EQ(products[i + 1], torch::kFloat) << microbatches << " microbatches";
      }
    }
  });
}

TEST(SplitModelTest, BackwardLeavesTheCallersAutocast) {
  lockstep::run({torch::kCPU}, [](Rank& rank) {
    SplitModel net(make_net(), rank, {});
    const lockstep::Autocast bf16(rank.device());
    auto loss = net.loss(make_batch(4, 0), [&](const Tensor& y_hat, const Tensor& y) {
      const Tensor loss = torch::nn::functional::cross_entropy(y_hat, y);
      loss.register_hook([](const Tensor&) {
        const Tensor ones = torch::ones({2, 2});
        EXPECT_EQ(ones.mm(ones).scalar_type(), torch::kFloat);
      });
      return loss;
    });
    loss.backward();
  });
}

lockstep::Caught error_with_batches(
    const lockstep::MeshShape& mesh,
    const std::function<lockstep::Batches(const lockstep::Dataset&, Rank&, SplitModel&)>& make) {
  const Batch all = make_batch(16, 0);
  return error_of([&] {
    lockstep::run(lockstep::test_devices(mesh.data * mesh.pipeline * mesh.tensor), [&](Rank& rank) {
      SplitModel net(make_net(), rank, {.mesh = mesh});
      lockstep::Optimizer sgd(net, torch::optim::SGDOptions(0.1));
      for (auto& batch : make({all.x, all.y}, rank, net))
        net.loss(batch, torch::nn::functional::cross_entropy).backward();
    });
  });
}

TEST(SplitModelTest, BatchesThatDifferWithinADataIndexAreRefused) {
  const auto of_another_seed = [](const lockstep::Dataset& data, Rank& rank, SplitModel& net) {
    return lockstep::batches(data, {.size = 8, .seed = rank.index() == 1 ? 1u : 0u}, net.mesh().data());
  };
  const auto of_another_size = [](const lockstep::Dataset& data, Rank& rank, SplitModel& net) {
    return lockstep::batches(data, {.size = rank.index() == 1 ? 7 : 8}, net.mesh().data());
  };
  EXPECT_THAT(error_with_batches({.tensor = 2}, of_another_seed), Fails(Error::difference));
  EXPECT_THAT(error_with_batches({.tensor = 2}, of_another_size), Fails(Error::difference));
  // The first batches are alike.
  const auto of_fewer_samples = [](const lockstep::Dataset& data, Rank& rank, SplitModel& net) {
    const int64_t size = rank.index() == 1 ? 12 : 16;
    return lockstep::batches({data.x.slice(0, 0, size), data.y.slice(0, 0, size)}, {.size = 8}, net.mesh().data());
  };
  EXPECT_THAT(error_with_batches({.tensor = 2}, of_fewer_samples), Fails(Error::difference));
  EXPECT_THAT(error_with_batches({.pipeline = 2, .tensor = 2}, of_another_seed), Fails(Error::difference));
  EXPECT_THAT(error_with_batches({.pipeline = 2}, of_another_seed), Fails(Error::difference));
  EXPECT_THAT(error_with_batches({.pipeline = 2}, of_another_size), Fails(Error::difference));
}

// Batches of the user's own have no mark: their values tell.
TEST(SplitModelTest, OwnBatchesThatDifferWithinADataIndexAreRefused) {
  const auto error = [](const lockstep::MeshShape& mesh, bool trains, int shift) {
    const Batch all = make_batch(16, 0);
    return error_of([&] {
      lockstep::run(lockstep::test_devices(2), [&](Rank& rank) {
        SplitModel net(make_net(), rank, {.mesh = mesh, .microbatches = 2});
        lockstep::Optimizer sgd(net, torch::optim::SGDOptions(0.1));
        for (int64_t step = 0; step < 2; ++step) {
          const int64_t begin = 4 * step + shift * rank.index();
          const Batch own{all.x.slice(0, begin, begin + 4), all.y.slice(0, begin, begin + 4), 4};
          trains ? net.loss(own, torch::nn::functional::cross_entropy).backward() : void(net.forward(own.x));
        }
      });
    });
  };
  for (const bool trains : {true, false}) {
    for (const lockstep::MeshShape& mesh : {lockstep::MeshShape{.pipeline = 2}, {.tensor = 2}}) {
      EXPECT_THAT(error(mesh, trains, 4), Fails(Error::difference));
      EXPECT_EQ(error(mesh, trains, 0), "(no error)");
    }
  }
}

TEST(SplitModelTest, BatchesSplitOverAllRanksAreRefused) {
  const auto split_over_all = [](const lockstep::Dataset& data, Rank& rank, SplitModel&) {
    return lockstep::batches(data, {.size = 8}, rank);
  };
  for (const lockstep::MeshShape& mesh :
       {lockstep::MeshShape{.tensor = 2}, {.pipeline = 2}, {.data = 2, .pipeline = 2}, {.data = 2, .tensor = 2}}) {
    EXPECT_THAT(error_with_batches(mesh, split_over_all), Fails(Error::difference)) << lockstep::to_string(mesh);
  }
}

// The refusal counts on the graph of the criterion's loss, which a stage's result no longer has.
TEST(SplitModelTest, AMeanOverSomeTargetsIsRefusedInAPipeline) {
  torch::manual_seed(5);
  const Tensor x = torch::randn({10, 4}, torch::kDouble);
  Tensor y = torch::arange(10) % 3;
  y.index_put_({torch::tensor({0, 2, 3})}, -100);
  for (const bool recompute : {false, true}) {
    const auto said = error_of([&] {
      lockstep::run(lockstep::test_devices(2), [&](Rank& rank) {
        Sequential layers(rank.in_turn([] { return Sequential(torch::nn::Linear(4, 4), torch::nn::Linear(4, 3)); }));
        layers->to(torch::kDouble);
        SplitModel split(layers, rank, {.mesh = {.pipeline = 2}, .microbatches = 2, .recompute = recompute});
        lockstep::Optimizer sgd(split, torch::optim::SGDOptions(0.1));
        split.loss({x, y, 10}, torch::nn::functional::cross_entropy).backward();
      });
    });
    EXPECT_THAT(said, Refused());
  }
}

TEST(SplitModelTest, ACriterionThatIsNoMeanIsRefusedOnEveryMesh) {
  const Batch batch{torch::sin(torch::arange(40, torch::kDouble)).view({10, 4}), torch::arange(10) % 3, 10};
  for (const auto& mesh : {lockstep::MeshShape{.pipeline = 2}, {.tensor = 2}}) {
    for (const bool checked : {true, false}) {
      const auto said = error_of([&] {
        lockstep::run(lockstep::test_devices(2), [&](Rank& rank) {
          Sequential layers(rank.in_turn([] { return Sequential(torch::nn::Linear(4, 4), torch::nn::Linear(4, 4)); }));
          layers->to(torch::kDouble);
          SplitModel split(layers, rank, {.mesh = mesh, .microbatches = 2});
          lockstep::Optimizer sgd(split, torch::optim::SGDOptions(0.1));
          const lockstep::Criterion spread([](const Tensor& y_hat, const Tensor&) { return y_hat.var(); });
          split.loss(batch, checked ? spread : lockstep::Criterion::unchecked(spread)).backward();
        });
      });
      EXPECT_EQ(said.data.has_value(), checked) << said;
      if (checked) EXPECT_THAT(said, Refused("criterion"));
    }
  }
}

TEST(SplitModelTest, SyncBatchNormsAreRefused) {
  const auto error = [](int ranks, const auto& layers, const ModelSplit& split) {
    return lockstep::error_on_ranks(ranks, [&](Rank& rank) {
      Sequential net = layers();
      lockstep::convert_sync_batchnorm(*net, rank);
      SplitModel(net, rank, split);
    });
  };
  const auto linear = [] { return Sequential(torch::nn::Linear(2, 3), torch::nn::BatchNorm1d(3)); };
  const auto block = [] { return Sequential(lockstep::ResidualBlock(4, 4)); };
  EXPECT_THAT(error(1, linear, {.mesh = {.data = 1}, .microbatches = 2}), Refused());
  EXPECT_THAT(error(2, block, {.mesh = {.data = 1, .tensor = 2}}), Refused());
}

TEST(SplitModelTest, ASplitThatDoesNotFitIsRefusedBeforeTheFirstStep) {
  const auto error = [](int ranks, const ModelSplit& split) {
    return error_of([&] {
      lockstep::run(lockstep::test_devices(ranks), [&](Rank& rank) { SplitModel(make_net(), rank, split); });
    });
  };
  EXPECT_THAT(error(2, {.mesh = {.data = 3}}), Refused());
  EXPECT_THAT(error(1, {.mesh = {}, .schedule = PipelineSchedule::interleaved, .stages_per_rank = 9}), Refused());
  EXPECT_THAT(error(2, {.mesh = {.pipeline = 2}, .cuts = {8}}), Refused());
  EXPECT_THAT(error(2, {.mesh = {.pipeline = 2}, .cuts = {2, 3}}), Refused());
  EXPECT_THAT(error(2, {.mesh = {.pipeline = 2}, .stages_per_rank = 2}), Refused());
  EXPECT_THAT(error(1, {.microbatches = 0}), Refused());
  EXPECT_THAT(error(5, {.mesh = {.tensor = 5}}), Refused());
  const auto random = error_of([] {
    lockstep::run(lockstep::test_devices(2), [](Rank& rank) {
      Sequential net = make_net();
      net->push_back("drop", torch::nn::Dropout(0.5));
      SplitModel(net, rank, {.mesh = {.tensor = 2}, .recompute = true});
    });
  });
  EXPECT_THAT(random, Refused());
}

}  // namespace split_model_test
